"""The description of a released model: what its signer says of it, as JSON in UTF-8, and the check of its signature.

An operator's command writes it and signs its bytes, the coordinator stores and passes on the same bytes, and a device
checks them. The files follow one another in the released bytes, in the order of the description.

    description = Description(model="digits", version=3, run="digits-1", round=12, task="digits", ...)
    signature = key.sign(PURPOSE, digest_text(description.to_bytes()))
    check_signature([key.signer], description.to_bytes(), signature)
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from typing import Annotated, Literal, Self, get_args

from blake3 import blake3
from pydantic import AfterValidator, Field, ValidationError, model_validator

from fl_common.names import check_id
from fl_common.settings import Section, describe_json_error
from fl_common.signatures import SIGNATURE_BYTES, WrongSignature, verify

PURPOSE = "release"
"""What a signature of a description is for."""
MOST_BYTES = 32 << 10
"""Longest description."""
WEIGHTS = "model.safetensors"
"""The file that devices evaluate: parameters and buffers by their names in the state_dict."""
_MOST = 64

Form = Literal["whole", "adapter", "onnx"]
"""whole: WEIGHTS alone. adapter: peft's two files. onnx: model.onnx. The latter two have WEIGHTS beside them."""
FORMS: tuple[str, ...] = get_args(Form)


Id = Annotated[str, AfterValidator(partial(check_id, "a name in the description of a release"))]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""BLAKE3-256 in hex."""


class ReleasedFile(Section):
    """One file of a release."""

    name: Id
    size: int = Field(ge=1)
    """Bytes."""
    digest: Digest


class Description(Section):
    """What the signer of a release says of it."""

    model: Id
    """The model's name: devices keep one version of each name in use."""
    version: int = Field(ge=1, lt=1 << 31)
    run: Id
    """The run that made the model."""
    round: int | None
    """The run's round; None: its first model."""
    task: str = Field(min_length=1, max_length=256)
    """The task of the devices that it is for."""
    form: Form
    labels: dict[str, str] = Field(default_factory=dict, max_length=_MOST)
    """A device takes it only if it has all of these labels."""
    personal: list[str] = Field(default_factory=list, max_length=_MOST)
    """The run's patterns of personal parameters, whose values devices have themselves."""
    files: list[ReleasedFile] = Field(min_length=1, max_length=_MOST)
    size: int = Field(ge=1)
    """Bytes of all files."""
    digest: Digest
    """The digest of the bytes of all files, one after the other."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        names = {file.name for file in self.files}
        if len(names) != len(self.files):
            raise ValueError("files: expected different names")
        if WEIGHTS not in names:
            raise ValueError(f"files: expected {WEIGHTS} among them")
        if (size := sum(file.size for file in self.files)) != self.size:
            raise ValueError(f"size: expected {size}, the sum of the files, got {self.size}")
        return self

    def to_bytes(self) -> bytes:
        """The bytes that are signed."""
        return json.dumps(self.model_dump(), separators=(",", ":"), sort_keys=True).encode()

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Whether a device with these labels may take it."""
        return self.labels.items() <= labels.items()

    def span(self, name: str) -> tuple[int, int]:
        """First byte and size of a file in the bytes. Raises KeyError."""
        start = 0
        for file in self.files:
            if file.name == name:
                return start, file.size
            start += file.size
        raise KeyError(name)


def parse_description(data: bytes) -> Description:
    """The description in some bytes. Raises ValueError, which names what is wrong."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"expected a description of at most {MOST_BYTES} bytes, got {len(data)}")
    try:
        return Description.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(f"expected the description of a release: {describe_json_error(error, Description)}") from None


def digest_text(data: bytes) -> str:
    """The digest of a description, as it is signed."""
    return f"blake3:{blake3(data).hexdigest()}"


def check_signature(signers: Collection[str], description: bytes, signature: bytes) -> str:
    """The one of these signers that signed a description. Raises WrongSignature if none did."""
    digest = digest_text(description)
    for signer in signers if len(signature) == SIGNATURE_BYTES else ():
        try:
            verify(signer, PURPOSE, digest, signature)
        except WrongSignature:
            continue
        return signer
    named = ", ".join(sorted(signers)) or "none"
    raise WrongSignature(f"expected a signature of {digest} by one of the trusted keys ({named}), got another one")
