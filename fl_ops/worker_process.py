"""What every process that works for another one does first."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading


def become_worker() -> None:
    """Use one torch thread, leave Ctrl-C to the parent, and end when the parent ends.

    The parent's objects stay: destroying a channel of gRPC that it had thrown away crashes a forked process, and would
    copy pages of memory that both share.
    """
    import torch

    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # the parent may block them at the fork
    torch.set_num_threads(1)
    end_with_parent()


def end_with_parent() -> None:
    """End this process of `multiprocessing` when its parent ends, also by SIGKILL."""
    threading.Thread(target=_wait_for_parent, name="parent-watch", daemon=True).start()


def _wait_for_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
