"""Environments of OpenEnv, run by its own interpreter: `servers.py tools|action PORT`."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    """Says something."""

    text: str


class Heard(Observation):
    said: str = ""


class Echo(Environment[Say, Heard, State]):
    """Scores lower-case letters; three steps an episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def reset(self, seed=None, episode_id=None, topic="", **kwargs):
        self._steps = 0
        return Heard(said=f"about {topic}" if topic else "")

    def step(self, action, timeout_s=None, **kwargs):
        self._steps += 1
        reward = sum(letter.islower() for letter in action.text) / 20
        return Heard(said=f"[{self._steps}]", reward=reward, done=self._steps == 3)

    @property
    def state(self):
        return State(step_count=self._steps)


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")

        @server.tool
        def say(text: str) -> str:
            """Says something."""
            return f"[{len(text)}]"

        @server.tool
        def fail() -> str:
            """Fails."""
            raise ValueError("no")

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(done=False, reward=None)

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=False, reward=None)

    @property
    def state(self):
        return State()


kinds = {"tools": (Tools, CallToolAction, CallToolObservation), "action": (Echo, Say, Heard)}
uvicorn.run(create_fastapi_app(*kinds[sys.argv[1]], max_concurrent_envs=16), port=int(sys.argv[2]), log_level="error")
