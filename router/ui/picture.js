// SPDX-License-Identifier: Apache-2.0

// The picture of the fleet: devices, in them each copy of weights once, at each copy the workers
// that read it, and in each worker its streams as dots. When a worker is gone, its dots move to the
// workers that go on with its streams.

import { byId, bytes, count, element } from "./elements.js";

/** Dots of a worker; further streams are a number. */
const DOTS_MAX = 40;
/** Answers for which the dots of a lost worker wait for their new workers. */
const LOST_ANSWERS_MAX = 3;
const MOVE_MS = 900;

/** Elements by what they show, kept so that they move instead of being made again. */
const [devices, copies, workers] = [new Map(), new Map(), new Map()];

export function drawPicture(fleet) {
    const copyKey = (one) => `${one.device} ${one.generation} ${one.digest}`;
    const absent = fleet.processes.filter((process) => {
        return (
            process.role === "worker" &&
            !fleet.workers.some((worker) => worker.name === process.name)
        );
    });
    const names = new Set([...fleet.workers, ...absent].map((worker) => worker.name));
    const deviceParts = fleet.devices.map((device) => {
        const parts = [];
        const shown = new Set();
        for (const copy of fleet.copies.filter((copy) => copy.device === device.device)) {
            const own = fleet.workers
                .filter((worker) => copyKey(worker) === copyKey(copy))
                .map(drawWorker);
            const lost = absent.filter(
                (one) =>
                    one.device === copy.device &&
                    copy.models.includes(one.model) &&
                    !shown.has(one.name),
            );
            lost.forEach((one) => shown.add(one.name));
            parts.push(drawCopy(copy, copyKey(copy), byName([...own, ...lost.map(drawAbsent)])));
        }
        const rest = absent.filter((one) => one.device === device.device && !shown.has(one.name));
        if (rest.length) parts.push(element("div", "boxes", ...byName(rest.map(drawAbsent))));
        return drawDevice(device, parts);
    });
    moveDots(fleet.workers, names, () => {
        arrange(byId("picture"), deviceParts);
        forget(devices, new Set(fleet.devices.map((device) => device.device)));
        forget(copies, new Set(fleet.copies.map(copyKey)));
        forget(workers, names);
    });
}

const byName = (boxes) =>
    boxes.sort((a, b) =>
        a.dataset.name.localeCompare(b.dataset.name, undefined, { numeric: true }),
    );

function forget(map, kept) {
    for (const key of map.keys()) if (!kept.has(key)) map.delete(key);
}

/** Sets the children, and touches nothing if they are the same. */
function arrange(parent, children) {
    const isSame =
        parent.children.length === children.length &&
        children.every((child, at) => parent.children[at] === child);
    if (!isSame) parent.replaceChildren(...children);
}

function kept(map, key, make) {
    if (!map.has(key)) map.set(key, make());
    return map.get(key);
}

function drawDevice(device, parts) {
    const box = kept(devices, device.device, () => {
        const [title, content] = [element("div", "title"), element("div", "")];
        return { root: element("div", "device", title, content), title, content };
    });
    box.root.classList.toggle("quarantined", Boolean(device.quarantine));
    box.title.replaceChildren(element("span", "name", device.device), ...figures(device));
    arrange(box.content, parts.length ? parts : [element("div", "faint", "no weights in use")]);
    return box.root;
}

function figures(device) {
    if (device.quarantine)
        return [element("span", "alarm", `quarantined: ${device.quarantine.reason}`)];
    const all = device.figures ?? {};
    const texts = [];
    if (all.utilization_percent != null) texts.push(`${all.utilization_percent} % busy`);
    if (all.temperature_celsius != null) texts.push(`${all.temperature_celsius} °C`);
    if (all.power_milliwatts != null) texts.push(`${Math.round(all.power_milliwatts / 1000)} W`);
    if (device.xid_errors) texts.push(`${device.xid_errors} Xid errors`);
    return texts.map((text) => element("span", "faint", text));
}

function drawCopy(copy, key, boxes) {
    const part = kept(copies, key, () => {
        const [title, content] = [element("div", ""), element("div", "boxes")];
        return { root: element("div", "copy", title, content), title, content };
    });
    const users = boxes.length === 1 ? "1 worker" : `${boxes.length} workers`;
    part.title.replaceChildren(
        element("span", "name", copy.models.join(", ")),
        element("span", "faint", ` one copy of ${bytes(copy.bytes)} for ${users}`),
    );
    arrange(part.content, boxes);
    return part.root;
}

function workerBox(name) {
    return kept(workers, name, () => {
        const parts = {
            title: element("div", ""),
            dots: element("div", "dots"),
            meter: element("span", ""),
            note: element("div", "faint"),
        };
        const root = element(
            "div",
            "worker",
            parts.title,
            parts.dots,
            element("div", "meter", parts.meter),
            parts.note,
        );
        root.dataset.name = name;
        return { root, ...parts, lostAnswers: 0 };
    });
}

function drawWorker(worker) {
    const box = workerBox(worker.name);
    const used = worker.kv_total_tokens ? worker.kv_used_tokens / worker.kv_total_tokens : 0;
    box.root.classList.remove("absent");
    box.title.replaceChildren(element("span", "name", worker.name));
    box.meter.style.width = `${(used * 100).toFixed(1)}%`;
    const waiting = worker.waiting ? `, ${worker.waiting} wait` : "";
    box.note.textContent = `${worker.running} run${waiting} · KV ${Math.round(used * 100)} %`;
    const [held, total] = [count(worker.kv_used_tokens), count(worker.kv_total_tokens)];
    box.root.title = `KV cache: ${held} of ${total} tokens in use`;
    return box.root;
}

/** A worker that does not serve now. */
function drawAbsent(process) {
    const box = workerBox(process.name);
    box.root.classList.add("absent");
    box.title.replaceChildren(element("span", "name", process.name));
    box.meter.style.width = "0";
    box.note.textContent = process.state === "ready" ? "joining" : process.state;
    box.root.title = process.last_termination;
    return box.root;
}

/** What a worker has to do, of this router and of others. */
function streamsOf(worker) {
    const all = Math.max(worker.streams, worker.running + worker.waiting);
    return { all, waiting: Math.min(worker.waiting, all) };
}

/** Gives each worker its number of dots. `rearrange` changes the boxes meanwhile. */
function moveDots(reported, names, rearrange) {
    const wanted = new Map(reported.map((worker) => [worker.name, streamsOf(worker)]));
    const free = [];
    const take = (dots) =>
        dots.forEach((dot) => free.push({ dot, from: dot.getBoundingClientRect() }));
    for (const [name, box] of workers) {
        const has = [...box.dots.querySelectorAll(".dot")];
        const want = Math.min(wanted.get(name)?.all ?? 0, DOTS_MAX);
        if (has.length > want)
            take(has.slice(want).map((dot) => Object.assign(dot, { isLost: !wanted.has(name) })));
    }
    free.sort((a, b) => Number(b.dot.isLost) - Number(a.dot.isLost));
    rearrange();
    for (const [name, streams] of wanted) fillBox(workers.get(name), streams, free);
    for (const { dot } of free) {
        const box = [...workers.values()].find((box) => box.dots.contains(dot));
        const waits = dot.isLost && box && names.has(box.root.dataset.name);
        dot.answers = (dot.answers ?? 0) + 1;
        if (!waits || dot.answers > LOST_ANSWERS_MAX) dot.remove();
    }
}

function fillBox(box, streams, free) {
    const more = box.dots.querySelector(".more");
    more?.remove();
    const has = () =>
        [...box.dots.querySelectorAll(".dot")].filter(
            (dot) => !free.some((one) => one.dot === dot),
        );
    for (let missing = Math.min(streams.all, DOTS_MAX) - has().length; missing > 0; missing -= 1) {
        const moved = free.shift();
        const dot = moved?.dot ?? element("span", "dot");
        box.dots.append(dot);
        if (moved) animateMove(dot, moved.from);
    }
    const dots = has();
    dots.forEach((dot, at) => dot.classList.toggle("waiting", at >= dots.length - streams.waiting));
    if (streams.all > DOTS_MAX)
        box.dots.append(element("span", "faint more", `+${streams.all - DOTS_MAX}`));
}

function animateMove(dot, from) {
    Object.assign(dot, { isLost: false, answers: 0 });
    const to = dot.getBoundingClientRect();
    dot.classList.add("moved");
    setTimeout(() => dot.classList.remove("moved"), 2 * MOVE_MS);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const start = `translate(${from.left - to.left}px, ${from.top - to.top}px)`;
    dot.animate([{ transform: start }, { transform: "none" }], {
        duration: MOVE_MS,
        easing: "ease-in-out",
    });
}
