from setuptools import setup

# cffi_modules is ignored without a word in setup.cfg, where everything else stands.
setup(cffi_modules=["csd_optim/_build_native.py:ffibuilder", "csd_optim/_build_emulator.py:ffibuilder"])
