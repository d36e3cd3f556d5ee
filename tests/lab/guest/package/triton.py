"""As much of Triton as SGLang's loader of kernel configs asks for."""

__version__ = "3.6.0"
