"use strict";
// The page of a person's seat. Texts become text nodes and never HTML.
const at = (id) => document.getElementById(id);
let shown = "";
let number = 0;

function show(turn) {
  const state = JSON.stringify(turn);
  if (state === shown) return;
  shown = state;
  number = turn.number;
  at("send").disabled = !turn.open;
  const lines = turn.told !== undefined ? [{ role: "", text: turn.told }] : turn.messages || [];
  at("live").textContent = turn.open ? `it is your turn as ${turn.role}` : "waiting for the others";
  at("messages").replaceChildren(
    ...lines.map((message) => {
      const card = document.createElement("section");
      const who = document.createElement("h2");
      const text = document.createElement("pre");
      who.textContent = message.role;
      text.textContent = message.text;
      card.append(who, text);
      return card;
    }),
  );
  if (turn.open) at("text").focus();
}

async function look() {
  try {
    show(await (await fetch("api/turn")).json());
  } catch {
    at("live").textContent = "the plays are over, or the program was stopped";
    at("send").disabled = true;
  }
  setTimeout(look, 500);
}

async function send(event) {
  event.preventDefault();
  if (at("send").disabled) return;
  at("send").disabled = true;
  const body = JSON.stringify({ number, text: at("text").value });
  const reply = await fetch("api/answer", { method: "POST", headers: { "Content-Type": "application/json" }, body });
  const said = await reply.json();
  at("live").textContent = said.told ?? said.error;
  if (reply.ok) at("text").value = "";
}

at("form").addEventListener("submit", send);
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.ctrlKey) send(event);
});
look();
