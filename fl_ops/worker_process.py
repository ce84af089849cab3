"""What every process that works for another one does first."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading

import torch


def become_worker() -> None:
    """Use one torch thread, leave Ctrl-C to the parent, and end when the parent ends.

    The parent's objects stay: destroying a channel of gRPC that it had thrown away crashes a forked process, and would
    copy pages of memory that both share.
    """
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # the parent may block them at the fork
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)
