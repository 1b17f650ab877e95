"""A client program of `benchmarks.endpoint_load`: plays one episode per line of its standard input, and misbehaves as its task says.

It imports nothing but the standard library, writes what it sends and hears into a ledger of its own, line by line before it goes on, and
may be killed at any moment. A line of the ledger is a JSON list: ["begun", task], ["asked", task, request], ["heard", task, request, ids,
seconds], ["pay", task, reward], ["paid", task], ["refused", task, what], ["wrong", task, what], ["broken", task, why].
"""

import json
import os
import signal
import socket
import sys
import time

TIMEOUT_S = 900.0
LEDGER = os.open(os.path.join(sys.argv[1], f"{os.getpid()}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def note(*event):
    """A line of the ledger; it is in the file when this returns."""
    os.write(LEDGER, json.dumps(event).encode() + b"\n")


def send(url, body, retries=0, drop_s=None):
    """(status, body) of a POST; None if the connection is dropped after `drop_s` seconds."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.partition(":")
    data = json.dumps(body).encode()
    head = f"POST /{path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    head += f"X-Stainless-Retry-Count: {retries}\r\nConnection: close\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        connection.sendall(head.encode() + data)
        if drop_s is not None:
            time.sleep(drop_s)
            return None
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1."):
        raise ConnectionError("the server hung up")
    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    if length and int(length[0].split(b":")[1]) != len(body):
        raise ConnectionError("the answer is cut off")
    return int(head.split()[1]), body


def reply_of(answer, stream):
    """(text, ids) of a chat completion. Raises `ConnectionError` for a stream that is cut off."""
    if not stream:
        choice = json.loads(answer)["choices"][0]
        return choice["message"]["content"], [token["id"] for token in choice["logprobs"]["content"]]
    *events, done, _ = answer.split(b"\n\n")
    if done != b"data: [DONE]":
        raise ConnectionError("the stream is cut off")
    choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, [token["id"] for token in choices[-1]["logprobs"]["content"]]


def ask(episode, number, messages, drop_s=None):
    """The text of a reply; a request whose connection is dropped is sent again, as the SDKs do."""
    task, stream = episode["task"], episode["task"]["streams"][number]
    body = {"model": task["role"], "messages": messages, "max_tokens": task["max_tokens"], "logprobs": True, "stream": stream}
    url, start = episode["base_url"] + "/chat/completions", time.monotonic()
    note("asked", task["number"], number)
    answer = send(url, body, 0, drop_s)
    if answer is None and task["fault"] == "leave":
        sys.exit(1)
    status, reply = answer or send(url, body, 1)
    if status != 200:
        raise ConnectionError(f"status {status}")
    text, ids = reply_of(reply, stream)
    note("heard", task["number"], number, ids, round(time.monotonic() - start, 4))
    return text


def pay(episode):
    """Posts the reward, and notes that it was taken."""
    task = episode["task"]
    note("pay", task["number"], task["reward"])
    status, _ = send(episode["episode_url"] + "/reward", {"reward": task["reward"]})
    if status != 200:
        raise ConnectionError(f"status {status}")
    note("paid", task["number"])


def send_refused(episode, fault, path, body):
    """Posts what must be refused, and notes whether it was."""
    status, _ = send(episode["episode_url"] + path, body)
    note("refused" if status == 400 else "wrong", episode["task"]["number"], fault)


def die_in_a_request(episode):
    """Sends a part of a request, and is killed."""
    address, _, path = episode["base_url"].removeprefix("http://").partition("/")
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        head = f"POST /{path}/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        connection.sendall(f'{head}Content-Length: 500\r\n\r\n{{"model": '.encode())
        os.kill(os.getpid(), signal.SIGKILL)


def play(episode):
    """One episode with its fault."""
    task, messages = episode["task"], []
    fault = task["fault"]
    note("begun", task["number"])
    for number in range(len(task["streams"])):
        drop_s = None
        messages.append({"role": "user", "content": f"task {task['number']} request {number}"})
        if number == task["at"]:
            if fault == "kill":
                signal.setitimer(signal.ITIMER_REAL, task["delay_s"])  # whose signal kills, since nothing handles it
            if fault == "half":
                die_in_a_request(episode)
            if fault in ("drop", "leave"):
                drop_s = task["delay_s"]
        messages.append({"role": "assistant", "content": ask(episode, number, messages, drop_s)})
    chat = {"model": task["role"], "messages": messages[:1]}
    if fault == "nan":
        send_refused(episode, "pay that is no number", "/reward", {"reward": float("nan")})
    pay(episode)
    if fault == "twice":
        send_refused(episode, "second pay", "/reward", {"reward": task["reward"] + 1})
    if fault == "late":
        send_refused(episode, "request behind the pay", "/v1/chat/completions", chat)


def main():
    """Plays until there are no more lines; says "done" after each episode."""
    for line in sys.stdin:
        episode = json.loads(line)
        try:
            play(episode)
        except OSError as error:  # of the connection: the server was killed
            note("broken", episode["task"]["number"], str(error))
            sys.exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("done", flush=True)


if __name__ == "__main__":
    main()
