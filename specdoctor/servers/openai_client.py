"""Completions from any OpenAI-compatible server: vLLM, SGLang, llama-server and the like.

Contract: prompts go as token ids to `/v1/completions`, so that the server decodes exactly what our template made, or as
messages to `/v1/chat/completions`, where the server's own template applies. A failed request is tried again with
growing pauses (no connection, time-out, 408, 425, 429, 5xx); anything else is an error in one line. Sampling options
that servers fill with defaults of their own (top_k, min_p, penalties) are always sent, switched off.
"""

import json
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from specdoctor.errors import EnvironmentMissingError, SpecdoctorError

AGAIN = (408, 409, 425, 429)  # and 5xx
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds
KEY_VARIABLE = "OPENAI_API_KEY"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request. Either `prompt_ids` or `messages`. `top_k` 0 and `top_p` 1 are off."""

    prompt_ids: Sequence[int] = ()
    messages: Sequence[dict[str, str]] = ()
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # of 31 bits


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    ids: list[int] | None  # of the answer, where the server says them (vLLM does)
    finish: str  # "stop" or "length"


class OpenAIClient:
    """One server. Its methods may be called by several threads at once."""

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retries: int = 5,
        first_pause: float = FIRST_PAUSE,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        """`url` with or without `/v1`; `model` "" takes the server's first; the key is $OPENAI_API_KEY if not given."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpecdoctorError(f"--server {url}: expected an address such as http://localhost:8000/v1")
        self.base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.timeout, self.retries, self.first_pause = timeout, retries, first_pause
        self._key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        self._note = on_note or (lambda text: None)
        self._extras = True  # whether the server takes options beyond OpenAI's own
        # A proxy cannot reach this machine's own ports.
        handlers = [urllib.request.ProxyHandler({})] if parts.hostname in LOOPBACK else []
        self._opener = urllib.request.build_opener(*handlers)
        self.model = model or self._first_model()

    def complete(self, request: CompletionRequest) -> Completion:
        """The server's answer. Raises `SpecdoctorError` (refused) or `EnvironmentMissingError` (not to be had)."""
        chat = bool(request.messages)
        path = "/chat/completions" if chat else "/completions"
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "n": 1,
            "stream": False,
        }
        body |= {"messages": list(request.messages)} if chat else {"prompt": list(request.prompt_ids)}
        answer = self._send(path, body, _extras(request))
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if chat else choice["text"]
            ids = choice.get("token_ids")
            finish = choice.get("finish_reason") or "stop"
        except (KeyError, IndexError, TypeError, AttributeError):
            raise SpecdoctorError(
                f"{self.base}{path}: the answer has no choices[0] with a text; expected an OpenAI-compatible server"
            ) from None
        if finish not in ("stop", "length"):
            raise SpecdoctorError(f"{self.base}{path}: finish_reason is {finish!r}, expected 'stop' or 'length'")
        return Completion(text or "", ids if isinstance(ids, list) else None, finish)

    def _send(self, path: str, body: dict[str, Any], extras: dict[str, Any]) -> Any:
        """Post with the options beyond OpenAI's own, or without them where the server refuses those."""
        if not self._extras:
            return self._call(path, body)
        try:
            return self._call(path, body | extras)
        except _RefusedError as refused:
            if refused.status not in (400, 422) or extras["top_k"] > 0:
                raise
            try:
                answer = self._call(path, body)
            except _RefusedError:
                raise refused from None
        if self._extras:
            self._note(f"{self.base}: takes no {', '.join(extras)}; its own defaults of these apply")
        self._extras = False
        return answer

    def _first_model(self) -> str:
        try:
            return str(self._call("/models", None)["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise SpecdoctorError(f"{self.base}/models: names no model; give --server-model") from None

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        """One JSON answer, however many tries it takes."""
        pause, problem = self.first_pause, ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(pause * random.uniform(0.5, 1.0))
            try:
                return self._once(path, body)
            except urllib.error.HTTPError as error:
                said = _said(error)
                if error.code not in AGAIN and error.code < 500:
                    raise _RefusedError(f"{self.base}{path}: HTTP {error.code}: {said}", error.code) from None
                problem = f"HTTP {error.code}: {said}"
                pause = max(_retry_after(error), min(2 * pause, LONGEST_PAUSE) if attempt else pause)
                continue
            except (urllib.error.URLError, HTTPException, OSError) as error:
                problem = str(getattr(error, "reason", "") or error) or type(error).__name__
            except ValueError:
                problem = "the answer is not JSON"
            pause = min(2 * pause, LONGEST_PAUSE) if attempt else pause
        raise EnvironmentMissingError(
            f"{self.base}{path}: no answer in {self.retries + 1} tries ({problem}); is the server up? What is done is "
            "kept: run the command again to go on"
        )

    def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.base + path, data, headers)
        with self._opener.open(request, timeout=self.timeout) as response:
            return json.loads(response.read())


class _RefusedError(SpecdoctorError):
    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def _extras(request: CompletionRequest) -> dict[str, Any]:
    """Options beyond OpenAI's own, as vLLM, SGLang and llama-server call them; -1 is "off" to all three."""
    return {"top_k": request.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}


def _said(error: urllib.error.HTTPError) -> str:
    """The server's own words, on one line."""
    try:
        raw = error.read(4096).decode("utf-8", "replace")
    except (OSError, HTTPException):
        raw = ""
    try:
        found = json.loads(raw)
        detail = found.get("error", found) if isinstance(found, dict) else found
        raw = str(detail.get("message", detail) if isinstance(detail, dict) else detail)
    except ValueError:
        pass
    return " ".join(raw.split())[:200] or error.reason


def _retry_after(error: urllib.error.HTTPError) -> float:
    """Seconds that the server asks to wait, at most the longest pause."""
    try:
        return min(float(error.headers.get("Retry-After", 0)), LONGEST_PAUSE)
    except ValueError:
        return 0.0
