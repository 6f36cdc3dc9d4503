"""A process group for tensors on the emulated accelerator, in place of NCCL for FSDP2: gloo's, through host memory."""

import contextlib

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, _create_work_from_future
from torch.distributed.distributed_c10d import Backend


class ThroughHost(dist.ProcessGroup):
    """The collectives that FSDP2 and CSDAdam use. They are synchronous."""

    supports_coalescing = False
    group_name = pg_name = "through host"

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)

    @property
    def _device_types(self):
        return [torch.device("cpu"), torch.device("emu")]

    def getBackendName(self):
        return "through_host"

    def _get_backend(self, device):
        return self

    def _set_group_name(self, name):
        self.group_name = self.pg_name = name

    def _done(self, result):
        future = torch.futures.Future()
        future.set_result(result)
        return _create_work_from_future(future)

    def _on_host(self, call, out, own, options):
        host = torch.empty(out.shape, dtype=out.dtype)
        call(host, own.cpu(), options).wait()
        out.copy_(host)
        return self._done([out])

    def all_gather_single(self, out, own, options=None):
        return self._on_host(self._gloo._allgather_base, out, own, AllgatherOptions())

    def allgather(self, outs, own, options=None):
        self._gloo.allgather(outs, own).wait()  # for objects, whose bytes are in host memory
        return self._done(outs)

    def reduce_scatter_single(self, out, own, options):
        return self._on_host(self._gloo._reduce_scatter_base, out, own, options)

    def all_to_all_single(self, out, own, out_sizes, own_sizes, options):
        host = torch.empty(out.shape, dtype=out.dtype)
        self._gloo.alltoall_base(host, own.cpu(), out_sizes, own_sizes, options).wait()
        out.copy_(host)
        return self._done([out])

    def _in_place(self, call, tensors, options):
        for t in tensors:
            host = t.cpu()
            call([host], options).wait()
            t.copy_(host)
        return self._done(tensors)

    def allreduce(self, tensors, options=None):
        return self._in_place(self._gloo.allreduce, tensors, options or AllreduceOptions())

    def broadcast(self, tensors, options):
        return self._in_place(self._gloo.broadcast, tensors, options)

    def barrier(self, options=None):
        self._gloo.barrier().wait()
        return self._done([])


def join(directory, rank, size):
    """Replace this process's group by one that also takes tensors on the emulated accelerator."""
    module = torch.get_device_module("emu")  # gets what FSDP2 expects of a device module
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = torch.accelerator.current_stream
    module.set_device = torch.accelerator.set_device_index
    module.stream = lambda stream: stream or contextlib.nullcontext()
    dist.destroy_process_group()
    Backend.register_backend("through_host", ThroughHost, devices=["cpu", "emu"])
    dist.init_process_group("through_host", init_method=f"file://{directory}/through-host", rank=rank, world_size=size)
