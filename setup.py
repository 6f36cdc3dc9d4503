from setuptools import setup

# Everything else is in setup.cfg, which silently ignores cffi_modules.
setup(cffi_modules=["native/build.py:ffibuilder", "hls_kernels/build.py:ffibuilder"])
