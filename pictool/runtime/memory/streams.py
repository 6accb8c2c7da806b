"""Streams: queues of a device's work beside each other, through torch's device-agnostic API.

A stream beside the current one copies to the device while the current one computes. What is queued on one is ordered
with the other by events alone: `Stream.wait_event`. The host may write to memory that a copy reads only after it
waited for an event that was recorded after the copy.
"""

from __future__ import annotations

import torch

from pictool.runtime.device import has_streams


def side_stream(device: torch.device, after: torch.Event) -> torch.Stream:
    """A new stream that begins after an event. One thread alone enters it."""
    stream = torch.Stream(device)
    stream.wait_event(after)
    return stream


def event_now(device: torch.device) -> torch.Event | None:
    """An event after all that the current stream has to do so far; None on a device without streams.

    Each thread has a current stream of its own: what another thread reads is there after this event alone.
    """
    return torch.accelerator.current_stream(device).record_event() if has_streams(device) else None


def order_after(event: torch.Event, device: torch.device) -> None:
    """Have the current stream go on only after an event; the host does not wait."""
    torch.accelerator.current_stream(device).wait_event(event)


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Host memory, uint8 [num_bytes]: page-locked where a device copies from it while the host goes on."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_streams(device))
