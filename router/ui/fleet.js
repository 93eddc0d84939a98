// SPDX-License-Identifier: Apache-2.0

// The fleet view: asks for the fleet once a second while it is looked at.

import { getJson } from "./api.js";
import { byId, count, element, seconds, showProblem } from "./elements.js";
import { drawLedger } from "./ledger.js";
import { drawPicture } from "./picture.js";
import { drawPlots, latestRates, remember } from "./plots.js";

const POLL_MS = 1000;

let isShown = false;
let timer = 0;
/** Increases with each change of what is shown, so that a late answer is not taken. */
let turn = 0;

/** Begins to ask, or stops it. */
export function showFleet(shown) {
    isShown = shown;
    restart();
}

document.addEventListener("visibilitychange", restart);

function restart() {
    clearTimeout(timer);
    turn += 1;
    byId("connection").textContent = "";
    if (isShown && !document.hidden) poll(turn);
}

async function poll(own) {
    let pause = POLL_MS;
    try {
        const fleet = await getJson("/ui/fleet");
        if (own !== turn) return;
        showProblem(byId("fleet-problem"), null);
        byId("connection").textContent = fleet.has_supervisor
            ? "live"
            : "live, without a supervisor";
        draw(fleet);
    } catch (error) {
        if (own !== turn) return;
        byId("connection").textContent = "";
        showProblem(byId("fleet-problem"), error.message);
        pause = Math.max(POLL_MS, (error.retryAfterSeconds ?? 0) * 1000);
    }
    timer = setTimeout(() => poll(own), pause);
}

function draw(fleet) {
    const sum = (field) => fleet.workers.reduce((total, worker) => total + worker[field], 0);
    const streams = { running: sum("running"), waiting: sum("waiting") };
    remember(fleet.totals, streams);
    drawFigures(fleet.totals, streams);
    drawPicture(fleet);
    drawLedger(fleet.devices);
    drawPlots();
    drawModels(fleet.models);
    drawProcesses(fleet.processes);
}

function drawFigures(totals, streams) {
    const rates = latestRates();
    const finished = Object.values(totals.finished).reduce((sum, one) => sum + one, 0);
    const figures = [
        ["Output tokens/s", rates ? count(rates.output) : "–"],
        ["Prompt tokens/s", rates ? count(rates.prompt) : "–"],
        ["Streams running", count(streams.running)],
        ["Waiting at workers", count(streams.waiting)],
        ["Answers ended", count(finished)],
        ["Streams resumed", count(totals.stream_resumes)],
        ["Requests refused", count(totals.requests_refused)],
    ];
    const shown = figures.map(([name, value]) =>
        element("div", "", element("dt", "", name), element("dd", "", value)),
    );
    byId("figures").replaceChildren(...shown);
}

function row(cells, isFaulty) {
    return element("tr", isFaulty ? "alarm" : "", ...cells.map((cell) => element("td", "", cell)));
}

function drawModels(models) {
    const rows = models.map((model) => {
        const part = model.total_bytes
            ? Math.floor((model.done_bytes / model.total_bytes) * 100)
            : 0;
        const state = model.state === "loading" ? `loading ${part} %` : model.state;
        const fallback = model.fallback ? `on the host: ${model.fallback}` : "";
        return row([model.name, state, model.failure || fallback], Boolean(model.failure));
    });
    byId("models").replaceChildren(...rows);
}

function drawProcesses(processes) {
    const rows = processes.map((process) => {
        const isFaulty = process.state === "failed" || process.state === "backing-off";
        const next =
            process.next_start_ms == null
                ? ""
                : `, next start in ${seconds(process.next_start_ms / 1000)}`;
        return row(
            [
                process.name,
                process.state + next,
                String(process.restarts),
                process.uptime_ms ? seconds(process.uptime_ms / 1000) : "–",
                process.model,
                process.last_termination,
            ],
            isFaulty,
        );
    });
    byId("processes").replaceChildren(...rows);
}
