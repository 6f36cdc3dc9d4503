from setuptools import setup

# cffi_modules is ignored without a word in setup.cfg, where everything else stands.
setup(cffi_modules=["native/build.py:ffibuilder", "hls_kernels/build.py:ffibuilder"])
