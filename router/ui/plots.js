// SPDX-License-Identifier: Apache-2.0

// Plots of the last minutes, from the differences between the counters of two answers.

import { byId, count, element, seconds } from "./elements.js";

const SHOWN_MS = 5 * 60 * 1000;
/** Latencies are of the answers within this time: one second may have none. */
const LATENCY_WINDOW_MS = 10 * 1000;
/** Answers further apart, or a router that began to count anew, leave a gap. */
const GAP_MS = 10 * 1000;
const QUANTILES = [0.5, 0.95];

/** One for each answer: counters, and what is plotted. */
let samples = [];

const PLOTS = [
    {
        title: "Tokens per second",
        lines: ["output", "prompt"],
        names: ["output", "prompt"],
        text: count,
    },
    {
        title: "Streams at workers",
        lines: ["running", "waiting"],
        names: ["running", "waiting"],
        text: count,
    },
    {
        title: "Time to first token",
        lines: ["first50", "first95"],
        names: ["median", "95 %"],
        text: seconds,
    },
    {
        title: "Time between tokens",
        lines: ["between50", "between95"],
        names: ["median", "95 %"],
        text: seconds,
    },
];

/** Adds an answer. */
export function remember(totals, streams) {
    const sample = { at: performance.now(), totals, ...streams };
    const before = samples.at(-1);
    if (before && follows(before, sample)) {
        const time = (sample.at - before.at) / 1000;
        sample.output = (totals.output_tokens - before.totals.output_tokens) / time;
        sample.prompt = (totals.prompt_tokens - before.totals.prompt_tokens) / time;
        const older = samples.find((one) => sample.at - one.at <= LATENCY_WINDOW_MS) ?? before;
        [sample.first50, sample.first95] = quantiles(
            older.totals.time_to_first_token,
            totals.time_to_first_token,
        );
        [sample.between50, sample.between95] = quantiles(
            older.totals.inter_token_latency,
            totals.inter_token_latency,
        );
    } else if (before) {
        sample.isAfterGap = true;
        // Counters of an earlier router are not compared with.
        if (totals.output_tokens < before.totals.output_tokens) samples = [];
    }
    samples = [...samples.filter((one) => sample.at - one.at <= SHOWN_MS), sample];
}

function follows(before, sample) {
    return (
        sample.at - before.at <= GAP_MS &&
        sample.totals.output_tokens >= before.totals.output_tokens
    );
}

/** The latest rates, or nothing after a gap. */
export function latestRates() {
    const last = samples.at(-1);
    return last?.output == null ? null : last;
}

/** Quantiles of what a histogram has counted since an earlier state, linear within a bucket. */
function quantiles(before, now) {
    const earlier = new Map(before.map(([bound, number]) => [bound, number]));
    const buckets = now.map(([bound, number]) => [bound, number - (earlier.get(bound) ?? 0)]);
    const total = buckets.at(-1)?.[1] ?? 0;
    return QUANTILES.map((quantile) => {
        if (total <= 0) return null;
        const rank = quantile * total;
        let [lower, below] = [0, 0];
        for (const [bound, number] of buckets) {
            if (number >= rank)
                return bound == null
                    ? lower
                    : lower + ((bound - lower) * (rank - below)) / (number - below);
            [lower, below] = [bound ?? lower, number];
        }
        return lower;
    });
}

export function drawPlots() {
    const root = byId("plots");
    if (!root.children.length) root.replaceChildren(...PLOTS.map(newPlot));
    const style = getComputedStyle(document.documentElement);
    const colours = ["--accent", "--second", "--line", "--faint"].map((name) =>
        style.getPropertyValue(name).trim(),
    );
    PLOTS.forEach((plot, index) => drawPlot(plot, root.children[index], colours));
}

function newPlot(plot) {
    const canvas = element("canvas", "");
    canvas.setAttribute("role", "img");
    const legend = ["first-line", "second-line"].map((className) => element("span", className));
    return element(
        "figure",
        "",
        element("figcaption", "", element("span", "", plot.title), ...legend),
        canvas,
    );
}

function drawPlot(plot, figure, [first, second, line, faint]) {
    const latest = plot.lines.map((field) => samples.at(-1)?.[field]);
    const texts = plot.names.map(
        (name, index) => `${name} ${latest[index] == null ? "–" : plot.text(latest[index])}`,
    );
    figure.querySelector(".first-line").textContent = texts[0];
    figure.querySelector(".second-line").textContent = texts[1];
    const canvas = figure.querySelector("canvas");
    canvas.setAttribute("aria-label", `${plot.title}: ${texts.join(", ")}`);
    const values = samples.flatMap((sample) => plot.lines.map((field) => sample[field] ?? 0));
    const maximum = niceMaximum(Math.max(...values, 0));
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    const scale = window.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [width * scale, height * scale];
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const area = { left: 1, top: 16, right: width - 1, bottom: height - 16 };
    drawAxes(context, area, plot.text(maximum), line, faint);
    const x = (at) => area.right - ((samples.at(-1).at - at) / SHOWN_MS) * (area.right - area.left);
    const y = (value) => area.bottom - (value / maximum) * (area.bottom - area.top);
    drawLine(context, plot.lines[1], second, x, y);
    drawLine(context, plot.lines[0], first, x, y);
}

/** The next number of 1, 2 or 5 times a power of ten. */
function niceMaximum(value) {
    if (!(value > 0)) return 1;
    const power = 10 ** Math.floor(Math.log10(value));
    return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? value;
}

function drawAxes(context, area, maximum, line, faint) {
    context.strokeStyle = line;
    context.beginPath();
    for (const part of [0, 0.5, 1]) {
        const at = Math.round(area.top + part * (area.bottom - area.top)) + 0.5;
        context.moveTo(area.left, at);
        context.lineTo(area.right, at);
    }
    context.stroke();
    context.fillStyle = faint;
    context.font = "11px system-ui, sans-serif";
    context.fillText(maximum, area.left, area.top - 4);
    context.fillText("5 min ago", area.left, area.bottom + 13);
    context.textAlign = "right";
    context.fillText("now", area.right, area.bottom + 13);
    context.textAlign = "left";
}

function drawLine(context, field, colour, x, y) {
    context.strokeStyle = colour;
    context.lineWidth = 1.5;
    context.beginPath();
    let isOpen = false;
    for (const sample of samples) {
        const value = sample[field];
        const isDrawn = value != null;
        if (isDrawn && isOpen && !sample.isAfterGap) context.lineTo(x(sample.at), y(value));
        else if (isDrawn) context.moveTo(x(sample.at), y(value));
        isOpen = isDrawn;
    }
    context.stroke();
}
