"""The client of OpenAI-compatible servers, against a local one that answers, fails now and then, and is slow."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from data_targets import STOP, target_folder, write_prompts

from specdoctor.errors import EnvironmentMissingError, ExitCode, SpecdoctorError
from specdoctor.servers.concurrent import run_concurrently
from specdoctor.servers.openai_client import CompletionRequest, OpenAIClient
from specdoctor.training.answers import AnswerSettings, Job, ServerAnswers
from specdoctor.training.regenerate import RegenerateRequest, regenerate
from specdoctor.training.samples import read_samples


class FakeServer(ThreadingHTTPServer):
    """Answers a prompt with the ids one above its own, then a stop token."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.failures: list[int] = []  # status codes of the next requests; 0: hang up
        self.forbidden: set[str] = set()  # keys that are refused
        self.delay = 0.0
        self.finish = "stop"
        self.says_ids = True
        self.broken: bytes | None = None
        self.running = self.most = 0
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.guard:
            server.bodies.append(body)
            server.paths.append(self.path)
            server.headers.append(dict(self.headers))
            failure = server.failures.pop(0) if server.failures else 200
            server.running += 1
            server.most = max(server.most, server.running)
        time.sleep(server.delay)
        with server.guard:
            server.running -= 1  # before the answer: on receiving it the client may send the next at once
        refused = server.forbidden & body.keys()
        if failure == 0:
            self.connection.close()
        elif failure != 200:
            self._answer(failure, {"error": {"message": "not\nnow"}})
        elif refused:
            self._answer(400, {"error": {"message": f"unknown {sorted(refused)[0]}"}})
        else:
            self._answer(200, self._completion(body))

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        server = self.server
        if self.path.endswith("/chat/completions"):
            text = body["messages"][-1]["content"].upper()
            return {"choices": [{"message": {"content": text}, "finish_reason": server.finish}]}
        ids = [token + 1 for token in body["prompt"]][: body["max_tokens"]]
        choice: dict[str, Any] = {"text": "".join(chr(97 + i) for i in ids), "finish_reason": server.finish}
        if server.says_ids:
            choice["token_ids"] = [*ids, STOP] if server.finish == "stop" else ids
        return {"choices": [choice]}

    def _answer(self, status: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode() if self.server.broken is None else self.server.broken
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    one = FakeServer()
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield one
    one.shutdown()
    one.server_close()


def client_of(server: FakeServer, **more: Any) -> OpenAIClient:
    return OpenAIClient(server.url, **{"api_key": "", "first_pause": 0.001, **more})


def test_ids_go_and_ids_come_with_every_default_switched_off(server: FakeServer) -> None:
    client = client_of(server, api_key="secret")
    completion = client.complete(CompletionRequest([5, 6], max_tokens=9, temperature=0.5, top_p=0.9, seed=7))
    assert (completion.ids, completion.finish) == ([6, 7, STOP], "stop")
    (body,) = server.bodies
    assert body["prompt"] == [5, 6] and body["model"] == client.model == "tiny" and body["max_tokens"] == 9
    assert (body["temperature"], body["top_p"], body["seed"]) == (0.5, 0.9, 7)
    assert (body["top_k"], body["min_p"], body["repetition_penalty"], body["stream"]) == (-1, 0.0, 1.0, False)
    assert server.paths == ["/v1/completions"] and server.headers[0]["Authorization"] == "Bearer secret"


def test_messages_go_to_the_chat_route_and_no_key_is_sent_without_one(server: FakeServer) -> None:
    request = CompletionRequest(messages=[{"role": "user", "content": "hi"}])
    completion = OpenAIClient(server.url.removesuffix("/v1") + "/", api_key="").complete(request)
    assert (completion.text, completion.ids) == ("HI", None)
    assert server.paths == ["/v1/chat/completions"] and "Authorization" not in server.headers[0]


@pytest.mark.parametrize("failures", [[500], [429, 503], [0], [503, 0, 429]])
def test_failures_that_pass_are_tried_again(server: FakeServer, failures: list[int]) -> None:
    server.failures = list(failures)
    assert client_of(server, retries=3).complete(CompletionRequest([5])).ids == [6, STOP]
    assert len(server.bodies) == len(failures) + 1


def test_failures_that_stay_end_in_one_line(server: FakeServer) -> None:
    server.failures = [503] * 9
    with pytest.raises(EnvironmentMissingError, match=r"no answer in 3 tries \(HTTP 503: not now\)"):
        client_of(server, retries=2).complete(CompletionRequest([5]))
    assert len(server.bodies) == 3


def test_a_refusal_is_not_tried_again(server: FakeServer) -> None:
    server.failures = [401, 200]
    with pytest.raises(SpecdoctorError, match=r"/v1/completions: HTTP 401: not now") as caught:
        client_of(server).complete(CompletionRequest([5]))
    assert caught.value.exit_code is ExitCode.USAGE and len(server.bodies) == 1


def test_a_slow_answer_times_out_and_an_absent_server_is_named(server: FakeServer) -> None:
    client = client_of(server, timeout=0.1, retries=1)
    server.delay = 1.0
    with pytest.raises(EnvironmentMissingError, match=r"no answer in 2 tries \(.*timed out"):
        client.complete(CompletionRequest([5]))
    server.delay = 0.0
    port = FakeServer()
    port.server_close()
    with pytest.raises(EnvironmentMissingError, match="is the server up"):
        OpenAIClient(port.url, retries=0)
    with pytest.raises(SpecdoctorError, match="--server ftp://x: expected an address"):
        OpenAIClient("ftp://x")


def test_answers_of_another_kind_are_refused(server: FakeServer) -> None:
    client = client_of(server, retries=0)
    server.broken = b'{"hello": 1}'
    with pytest.raises(SpecdoctorError, match=r"the answer has no choices\[0\]"):
        client.complete(CompletionRequest([5]))
    server.broken = b"<html>"
    with pytest.raises(EnvironmentMissingError, match="the answer is not JSON"):
        client.complete(CompletionRequest([5]))
    server.broken, server.finish = None, "content_filter"
    with pytest.raises(SpecdoctorError, match="finish_reason is 'content_filter'"):
        client.complete(CompletionRequest([5]))


def test_a_strict_server_gets_openais_own_options_and_it_is_said_once(server: FakeServer) -> None:
    server.forbidden = {"min_p"}
    notes: list[str] = []
    client = client_of(server, on_note=notes.append)
    for _ in range(2):
        assert client.complete(CompletionRequest([5])).ids == [6, STOP]
    assert len(notes) == 1 and "takes no top_k, min_p" in notes[0]
    assert ["min_p" in body for body in server.bodies] == [True, False, False]
    with pytest.raises(SpecdoctorError, match="unknown min_p"):  # a top-k that was asked for is not dropped in silence
        client_of(server).complete(CompletionRequest([5], top_k=4))


def test_requests_in_flight_are_bounded_and_all_are_answered(server: FakeServer) -> None:
    server.delay = 0.02
    client = client_of(server)
    done = dict(run_concurrently(range(20), lambda i: client.complete(CompletionRequest([i])).ids, 4))
    assert done == {i: [i + 1, STOP] for i in range(20)}
    assert 1 < server.most <= 4


def test_after_a_failure_what_was_in_flight_still_comes() -> None:
    started: list[int] = []

    def work(job: int) -> int:
        started.append(job)
        if job == 3:
            raise SpecdoctorError("no")
        time.sleep(0.05)
        return job

    got = []
    with pytest.raises(SpecdoctorError, match="no"):
        for job, _ in run_concurrently(range(1000), work, 4):
            got.append(job)
    assert sorted(got) == sorted(set(started) - {3}) and len(started) < 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target_folder(tmp_path_factory.mktemp("target"))


def request_of(server: FakeServer, folder: Path, tmp_path: Path, **more: Any) -> RegenerateRequest:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 12)
    settings = more.pop("settings", AnswerSettings(5))
    options = {"template": "bytes", "server": server.url, "concurrency": 3} | more
    return RegenerateRequest(prompts, str(folder), tmp_path / "data", settings, **options)


def test_a_server_writes_the_data_folder(server: FakeServer, folder: Path, tmp_path: Path) -> None:
    request = request_of(server, folder, tmp_path)
    assert regenerate(request)["written"] == 12
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["writer"] == "server/completions" and manifest["server_model"] == "tiny"
    assert len(manifest["target_hash"]) == 32 and "secret" not in json.dumps(manifest)
    for sample in read_samples(tmp_path / "data"):
        n = sample.loss_mask.index(True)
        prompt, answer = sample.ids[:n], sample.ids[n:]
        assert answer == [*[token + 1 for token in prompt][:5], STOP], "the target's stop token belongs to the answer"
    asked = len(server.bodies)
    assert regenerate(request)["written"] == 0 and len(server.bodies) == asked
    with FakeServer() as elsewhere:
        threading.Thread(target=elsewhere.serve_forever, daemon=True).start()
        request.server = elsewhere.url
        assert regenerate(request)["written"] == 0, "the same data at another address"
        elsewhere.shutdown()


def test_what_was_answered_before_a_failure_is_kept(server: FakeServer, folder: Path, tmp_path: Path) -> None:
    request = request_of(server, folder, tmp_path, concurrency=1)
    server.failures = [200, 200, 200, 200, 401]
    with pytest.raises(SpecdoctorError, match="HTTP 401"):
        regenerate(request)
    assert len(read_samples(tmp_path / "data")) == 4
    assert regenerate(request)["written"] == 8
    assert len(read_samples(tmp_path / "data")) == 12


def test_each_sample_has_a_seed_of_its_own(server: FakeServer, folder: Path, tmp_path: Path) -> None:
    regenerate(request_of(server, folder, tmp_path, settings=AnswerSettings(5, 1.0), samples=2))
    seeds = [body["seed"] for body in server.bodies]
    assert len(set(seeds)) == 24 and all(0 <= seed < 2**31 for seed in seeds)


def answers_of(server: FakeServer, **more: Any) -> Any:
    from specdoctor.measure.prompts import Prompt

    options = {"encode": lambda text: list(text.encode()), "stop_ids": frozenset({STOP}), "end_id": STOP}
    writer = ServerAnswers(client_of(server), **{**options, "max_positions": 100, **more})
    messages = ({"role": "user", "content": "ab"},)
    job = Job(Prompt("p", "", [5, 6, 7], "h", "file:1"), messages, 0, "k")
    [(same, answer)] = writer.answers([job], AnswerSettings(5))
    assert same is job
    return answer


def test_texts_become_ids_where_the_server_says_none(server: FakeServer) -> None:
    server.says_ids = False
    answer = answers_of(server)
    assert (answer.ids, answer.stop) == ([*b"ghi", STOP], "stop"), "its end is told by finish_reason"
    server.finish = "length"
    answer = answers_of(server)
    assert (answer.ids, answer.stop) == ([*b"ghi"], "length")
    answer = answers_of(server, max_positions=5)
    assert (answer.ids, answer.stop) == ([*b"gh"], "context") and server.bodies[-1]["max_tokens"] == 2


def test_chat_servers_get_the_messages(server: FakeServer) -> None:
    answer = answers_of(server, chat=True)
    assert answer.ids == [*b"AB", STOP] and server.bodies[-1]["messages"][0]["content"] == "ab"
