// SPDX-License-Identifier: Apache-2.0

// Elements of the page, and figures as texts. All text becomes text nodes, never markup.

export const byId = (id) => document.getElementById(id);

/** An element with a class and children, which are elements or texts. */
export function element(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children);
    return made;
}

/** Shows a message, or hides the element if there is none. */
export function showProblem(target, message) {
    target.textContent = message ?? "";
    target.hidden = !message;
}

export function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (count >= 1024 && unit < units.length - 1) {
        count /= 1024;
        unit += 1;
    }
    return `${unit === 0 || count >= 100 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

export function seconds(time) {
    if (time < 1) return `${Math.round(time * 1000)} ms`;
    if (time < 120) return `${time.toFixed(time < 10 ? 1 : 0)} s`;
    const minutes = Math.floor(time / 60);
    if (minutes < 120) return `${minutes} min`;
    const hours = Math.floor(minutes / 60);
    return hours < 48 ? `${hours} h` : `${Math.floor(hours / 24)} d`;
}

export function count(number) {
    if (number >= 10000) return `${(number / 1000).toFixed(number >= 100000 ? 0 : 1)}k`;
    return number >= 100 ? String(Math.round(number)) : String(Math.round(number * 10) / 10);
}
