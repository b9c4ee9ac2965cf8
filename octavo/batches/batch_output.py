"""`BatchOutput`, the answers of a batch as they come: OpenAI's JSONL, a line for each.

    {"id": "batch_req_…", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "…", "body": {…}}}

A line is written whole, and the file says what is done: a run that was interrupted leaves out what
has an answer there. A line that is torn, and those whose ``error`` says that no answer came, are
dropped when the file is opened again.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from octavo.base.files import NewFile
from octavo.batches.batch_input import BatchFileError


class BatchOutput:
    """The file of answers to some requests, open for more of them.

    Args:
        custom_ids: of the requests.

    ``done`` has those that are answered; ``num_failed`` counts answers with another status than
    200.

    Raises:
        BatchFileError: the file has something else, such as answers to other requests.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, custom_ids: Collection[str]):
        self.done: set[str] = set()
        self.num_failed = 0
        if path.exists():
            self._take_over(path, set(custom_ids))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - until __exit__

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *exception: object) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def write_answer(self, custom_id: str, status: int, body: Any, request_id: str) -> None:
        """Add what a server answered."""
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._write(custom_id, response, None)
        self.done.add(custom_id)
        self.num_failed += status != 200

    def write_failure(self, custom_id: str, code: str, message: str) -> None:
        """Add that no answer came; the next run asks again."""
        self._write(custom_id, None, {"code": code, "message": message})
        self.num_failed += 1

    def _write(self, custom_id: str, response: Any, error: Any) -> None:
        line = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def _take_over(self, path: Path, custom_ids: set[str]) -> None:
        """Read what is done, and write the file anew with that alone."""
        with open(path, "rb") as file, NewFile(path) as new:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # torn: the run ended while it wrote
                try:
                    answer = json.loads(line)
                    custom_id, response = answer["custom_id"], answer["response"]
                    status = None if response is None else response["status_code"]
                except (ValueError, TypeError, KeyError) as error:
                    raise BatchFileError(
                        f"{path}, line {number} is no answer of a batch: choose another output"
                    ) from error
                if custom_id not in custom_ids:
                    raise BatchFileError(
                        f"{path}, line {number} answers {custom_id!r}, which is not among the "
                        "requests: choose another output"
                    )
                if status is None or custom_id in self.done:
                    continue
                self.done.add(custom_id)
                self.num_failed += status != 200
                new.file.write(line)
            new.publish()
