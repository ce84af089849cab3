"""The outside count of what privacy accounts were charged, in the object store, beside what the ledger counts.

    LEDGER/privacy-counts/<hex of the account>/000000012

Each object has the count of one account up to a charge. The ledger does not refer to them, so a ledger that was
restored from a backup finds counts that are newer than itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fl_common.settings import parse_json
from fl_server.store.errors import StoreError
from fl_server.store.objects.bucket import Bucket

FOLDER = "privacy-counts"


class ChargeCounts:
    """The counts of one ledger's accounts. Blocking; raises StoreUnavailable while the store fails."""

    def __init__(self, bucket: Bucket, root: str) -> None:
        """root: the id of the ledger."""
        self._bucket, self._folder = bucket, f"{root}/{FOLDER}"

    def put(self, account: str, count: Mapping[str, Any]) -> None:
        """Write the count of an account, durably, and remove its older ones."""
        folder = f"{self._folder}/{hashlib.sha256(account.encode()).hexdigest()}"
        content = json.dumps({"account": account, **count}).encode()
        newest = f"{folder}/{count['number']:09d}"
        self._bucket.put(newest, content, durable=True)
        self._bucket.delete([key for key, _ in self._bucket.keys(folder) if key < newest])

    def all(self) -> dict[str, dict[str, Any]]:
        """The newest count of each account."""
        newest: dict[str, str] = {}
        for key, _ in self._bucket.keys(self._folder):
            folder = key.rpartition("/")[0]
            newest[folder] = max(newest.get(folder, ""), key)
        counts = {}
        for key in newest.values():
            count = parse_json(self._bucket.get(key).decode())
            if not isinstance(count, dict):
                raise StoreError(f"expected the count of a privacy account in the object {key}, got something else")
            counts[str(count.pop("account"))] = count
        return counts
