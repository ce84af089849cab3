"""A coordinator that lies in secure aggregation: `LIE=keys` or `LIE=lists`.

keys: in the list that it sends, the first client's masking key is one of its own. lists: the first two survivors are
told another list than the others, one without the last client.
"""

from __future__ import annotations

import os
import runpy
from dataclasses import replace

from fl_common.secure_aggregation import messages
from fl_common.secure_aggregation.collector import Collector
from fl_common.secure_aggregation.fields import packed, unpacked
from fl_common.secure_aggregation.group import KeyMessage
from fl_common.secure_aggregation.keys import public_key
from fl_server.rounds.state import Phase
from fl_server.run.secure_stages import Stage

_KEYS, _MESSAGE = Collector.close_keys, Stage.message_for


def _own_key(collector: Collector) -> bytes:
    digest, first, *others = unpacked(_KEYS(collector))
    swapped = replace(KeyMessage.from_bytes(first), mask_key=public_key(bytes(range(32))))
    return packed(digest, swapped.to_bytes(), *others)


def _two_lists(stage: Stage, client: str) -> bytes:
    survivors = stage.collector.survivors
    if stage.phase is Phase.SIGNING and client in survivors[:2]:
        return messages.message(stage.collector.terms, *range(len(survivors) - 1))
    return _MESSAGE(stage, client)


if __name__ == "__main__":
    if os.environ["LIE"] == "keys":
        Collector.close_keys = _own_key  # type: ignore[method-assign, assignment]  # of this process
    else:
        Stage.message_for = _two_lists  # type: ignore[method-assign, assignment]  # of this process
    runpy.run_module("fl_server", run_name="__main__")
