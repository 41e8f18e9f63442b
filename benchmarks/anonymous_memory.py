"""What a measuring program begins with that wants to know its largest anonymous memory."""

WATCH = """
import threading
from pathlib import Path
peak, over = 0, threading.Event()
def watch():
    global peak
    while not over.wait(0.02):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = max(peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))
threading.Thread(target=watch, daemon=True).start()
"""
"""Lines of Python: `peak` is the most that there was so far, in KiB; `over.set()` ends the watch."""
