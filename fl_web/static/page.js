// Keeps an open page current. The server sends changed parts, new events and new points; without this script every page
// is complete as it was loaded.
import { ago, elapsed } from "./format.js";
import { CompareCurves, RunCurves } from "./curves.js";

/* global Idiomorph */

const MOST_ENTRIES = 1000;
const body = document.body;
const link = document.getElementById("link");
const notice = document.getElementById("notice");

const section = document.querySelector("[data-curves]");
const figure = document.querySelector("[data-compare]");
const curves = section ? new RunCurves(section) : null;
const comparison = figure ? new CompareCurves(figure) : null;
if (curves) curves.load();
if (comparison) comparison.load();

function show(state, text, why = "") {
  link.dataset.state = state;
  link.querySelector(".link-text").textContent = text;
  body.classList.toggle("lost", state === "lost");
  notice.hidden = state !== "lost";
  if (state === "lost") notice.textContent = why;
}

// Elements are matched by their ids, so rows keep focus, open details and scroll positions. What a script has drawn in an
// element with data-keep stays.
const MORPH = {
  morphStyle: "innerHTML",
  callbacks: {
    beforeNodeMorphed: (element) => !(element.dataset && "keep" in element.dataset),
    beforeAttributeUpdated: (name, element) => !(name === "open" && element.nodeName === "DETAILS"),
  },
};

const on = {
  link({ up, why }) {
    if (up) show("live", "live");
    else show("lost", "connection lost", `The coordinator does not answer: ${why}. The values below are the last known ones. The page goes on by itself when it is back.`);
  },
  problem({ title, text }) {
    show("lost", "not live", `${title}: ${text}`);
  },
  parts(parts) {
    for (const [id, html] of Object.entries(parts)) {
      const target = document.getElementById(id);
      if (target) Idiomorph.morph(target, html, MORPH);
    }
    if (curves && "charts" in parts) curves.draw();
    if (comparison && "outcome" in parts) comparison.load();
    if ("now" in parts) received = Date.now();
    times();
    seconds();
  },
  curves(update) {
    if (curves) curves.add(update);
  },
  entries(rows) {
    const table = document.getElementById("entries");
    if (!table) return;
    for (const { number, html } of rows) {
      if (table.querySelector(`[data-number="${Number(number)}"]`)) continue;
      const source = document.createElement("template");
      source.innerHTML = html;
      const row = source.content.querySelector("tr");
      row.classList.add("fresh");
      table.prepend(row);
    }
    while (table.rows.length > MOST_ENTRIES) table.lastElementChild.remove();
  },
};

function times() {
  for (const element of document.querySelectorAll("time[data-ago]")) {
    const text = ago(Date.now() - Date.parse(element.dateTime));
    if (element.textContent !== text) element.textContent = text;
  }
}

let seen = "";

let source = null;

function loginEnded() {
  source.close();
  show("lost", "login ended", "Your login has ended. The values below are the last known ones. Log in again, and load the page again.");
}

on.login = loginEnded;

// A stream that the server refuses is not opened again by the browser.
async function reconnect() {
  const answer = await fetch(location.href, { method: "HEAD" }).catch(() => null);
  if (answer && answer.status === 401) loginEnded();
  else connect();
}

function connect() {
  const address = new URL(body.dataset.live, location.href);
  if (seen) address.searchParams.set("after", seen);
  source = new EventSource(address);
  for (const [name, act] of Object.entries(on)) {
    source.addEventListener(name, (event) => {
      seen = event.lastEventId || seen;
      act(JSON.parse(event.data));
    });
  }
  source.onerror = () => {
    show("lost", "connection lost", "The web server does not answer. The values below are the last known ones. The page goes on by itself when it is back.");
    if (source.readyState === EventSource.CLOSED) setTimeout(reconnect, 3000);
  };
}

// Seconds that are counted on here, from the last values that came.
let received = Date.now();

function seconds() {
  const passed = (Date.now() - received) / 1000;
  for (const element of document.querySelectorAll("[data-countdown]")) element.textContent = elapsed(element.dataset.countdown - passed);
  for (const element of document.querySelectorAll("[data-since]")) element.textContent = elapsed(Number(element.dataset.since) + passed);
}

setInterval(times, 5000);
setInterval(seconds, 1000);
times();
connect();
