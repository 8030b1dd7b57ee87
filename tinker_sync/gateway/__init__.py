"""Chat endpoints over a sampling client, which keep the exact tokens of what passes.

Programs that speak chat, such as agents, talk to the `Gateway` of this process by HTTP, in the form of OpenAI
or Anthropic. It samples through a `SamplingClient`, and keeps every exchange for the training.

    gateway     `Gateway`, returned by `SamplingClient.endpoint`: conversations, samples, records
    openai      chat completions, completions and models as OpenAI has them
    anthropic   messages as Anthropic has them
    http        connections, each with a thread of its own
    exchanges   `Exchange`, `Trajectory`, and their file of JSON lines

Threads: `tinker-gateway` accepts connections, and each connection has a thread that waits for its sample.
The client's own limits decide how many samples are under way.
"""

from __future__ import annotations

from tinker_sync.gateway.exchanges import Exchange, Trajectory, read_exchanges, to_trajectories
from tinker_sync.gateway.gateway import Gateway

__all__ = ["Exchange", "Gateway", "Trajectory", "read_exchanges", "to_trajectories"]
