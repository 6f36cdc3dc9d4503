# C synthesis of a kernel: the compiler's estimates of II, latency, DSP, block RAM and clock. Needs neither card nor
# platform, and takes minutes. The free edition supports the default part, which has the same fabric as the SmartSSD's.
#
#   make csynth                                             with vitis_hls, until 2024.1
#   make csynth HLS='vitis-run --mode hls --tcl'            from 2024.2 on
#   make csynth PART=xcku15p-ffva1156-2LV-e                 the SmartSSD's own part
#   make csynth KERNEL=csd_adamw_8bit_update                the kernel for codes
#
# This has not been run with an HLS compiler yet; a test runs it with mock commands.

proc setting {name default} {
    if {[info exists ::env($name)] && $::env($name) ne ""} {
        return $::env($name)
    }
    return $default
}

set kernel [setting KERNEL csd_adamw_update]
set part [setting PART xcku5p-ffvb676-2-e]
set frequency [setting FREQUENCY 200]
set here [file dirname [file normalize [info script]]]

file mkdir $here/build
cd $here/build
open_project -reset csynth
set_top $kernel
add_files $here/$kernel.cpp -cflags "-std=gnu++14 -I$here -I$here/../native/include"
open_solution -reset -flow_target vitis solution
set_part $part
create_clock -period ${frequency}MHz
csynth_design

# Print the table of all stages and their loops.
set report [open csynth/solution/syn/report/csynth.rpt]
puts [read $report]
close $report
exit
