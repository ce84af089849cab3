"""Encodings: bundles of tensors in fewer bytes than plain ones.

A bundle's layout says which tensors it has; its encoding says how the bytes of the trainable floating tensors are
written. One module has one family of encodings, and `codec` applies them to bundles, block by block. The package
depends on layouts and digests only. Negotiation of encodings, error feedback and averages are not part of it.
"""

from protos.encoding_spec import ENCODINGS, PLAIN, EncodingSpec
from protos.encodings.codec import decode, decode_range, encode
from protos.encodings.encoded_layout import EncodedLayout, Section
from protos.encodings.random_words import encoding_key
from protos.encodings.scheme import EncodingError

__all__ = [
    "ENCODINGS",
    "PLAIN",
    "EncodedLayout",
    "EncodingError",
    "EncodingSpec",
    "Section",
    "decode",
    "decode_range",
    "encode",
    "encoding_key",
]
