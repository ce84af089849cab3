"""The wire: the .proto contracts with their generated code, and the encoding of tensors as bytes.

What both ends of a connection must agree on may enter: layouts, chunks, digests, error details, sizes and options of
channels. Behaviour of one end may not. The package imports no other package of the project.
"""
