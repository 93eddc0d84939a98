// SPDX-License-Identifier: Apache-2.0

// The memory ledger: what the weight-server has promised of each device, as a stacked bar.

import { byId, bytes, element } from "./elements.js";

/** Field of the ledger, and class and name of its part of the bar. */
const PARTS = [
    ["weights_bytes", "weights", "weights"],
    ["workers_bytes", "workers", "workers"],
    ["other_bytes", "other", "checks and copies"],
];

export function drawLedger(devices) {
    const known = devices.filter((device) => device.ledger);
    const rows = known.map(ledgerRow);
    const none = element("div", "faint", "No ledger: the weight-server has not answered yet.");
    byId("ledger").replaceChildren(...(rows.length ? rows : [none]));
}

function ledgerRow({ device, ledger, figures }) {
    const used = PARTS.reduce((sum, [field]) => sum + ledger[field], 0);
    const parts = PARTS.filter(([field]) => ledger[field] > 0).map(([field, className, name]) => {
        const part = element("span", className);
        part.style.width = `${(ledger[field] / Math.max(ledger.capacity_bytes, 1)) * 100}%`;
        // A small part stays visible.
        part.style.minWidth = "3px";
        part.title = `${name}: ${bytes(ledger[field])}`;
        return part;
    });
    const bar = element("div", "bar", ...parts);
    const named = PARTS.map(([field, , name]) => `${name} ${bytes(ledger[field])}`).join(", ");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${device}: ${named} of ${bytes(ledger.capacity_bytes)}`);
    const board = figures?.memory_total_bytes
        ? `; the board has ${bytes(figures.memory_total_bytes)},` +
          ` ${bytes(figures.memory_used_bytes ?? 0)} in use`
        : "";
    const title = element("div", "", element("span", "name", device), " ");
    title.append(
        element(
            "span",
            "faint",
            `${bytes(used)} of ${bytes(ledger.capacity_bytes)}: ${named}${board}`,
        ),
    );
    return element("div", "", title, bar);
}
