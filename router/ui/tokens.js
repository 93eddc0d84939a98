// SPDX-License-Identifier: Apache-2.0

// The tokens of an answer: a span for each, coloured by its probability, with its alternatives in a
// tooltip. The pointer or the arrow keys point at one.

import { byId, element } from "./elements.js";

/** Text of a token that shows what is invisible. */
const SIGNS = { " ": "·", "\n": "↵", "\t": "→" };
const visible = (text) => text.replace(/[ \n\t]/g, (space) => SIGNS[space]);

const percent = (logprob) => {
    const part = Math.exp(logprob) * 100;
    return `${part >= 10 ? part.toFixed(0) : part.toFixed(part >= 0.1 ? 1 : 2)} %`;
};

/**
 * What the page keeps of a token: its text, its log probability and its alternatives, the most
 * probable first.
 */
function tokenOf(text, logprob, alternatives) {
    const others = alternatives.filter((other) => other.text !== text);
    return {
        text,
        logprob,
        top: [{ text, logprob, isChosen: true }, ...others].sort((a, b) => b.logprob - a.logprob),
    };
}

/** The tokens of a chat event's `logprobs`. */
export function tokensOfChat(logprobs) {
    const alternatives = (top) =>
        top.map((other) => ({ text: other.token, logprob: other.logprob }));
    const entries = logprobs?.content ?? [];
    return entries.map((entry) =>
        tokenOf(entry.token, entry.logprob, alternatives(entry.top_logprobs ?? [])),
    );
}

/** The tokens of a completion event's `logprobs`. */
export function tokensOfCompletion(logprobs) {
    const texts = logprobs?.tokens ?? [];
    return texts.map((text, index) => {
        const top = Object.entries(logprobs.top_logprobs?.[index] ?? {});
        const alternatives = top.map(([other, logprob]) => ({ text: other, logprob }));
        return tokenOf(text, logprobs.token_logprobs[index], alternatives);
    });
}

/** Shows a text that grows. */
export class TokenText {
    /** Tokens whose text has not come: parts of characters, or text that is held back. */
    #pending = [];
    #of = new Map();

    constructor() {
        this.root = element("div", "tokens");
        this.root.addEventListener("pointerover", (event) => this.#point(event.target));
        this.root.addEventListener("pointerdown", (event) => this.#point(event.target));
        this.root.addEventListener("pointerleave", () => this.#point(null));
        this.root.addEventListener("focusout", () => this.#point(null));
        this.root.addEventListener("keydown", (event) => this.#walk(event));
    }

    /** Adds text with its tokens. Tokens that do not make up the text share one span. */
    append(text, tokens) {
        this.#pending.push(...tokens);
        if (!text) return;
        const known = this.#pending;
        this.#pending = [];
        const isWhole = known.map((token) => token.text).join("") === text;
        if (isWhole) known.forEach((token) => this.#add(token.text, [token]));
        else this.#add(text, known);
    }

    /** Tokens of something else than this text, such as reasoning. */
    dropPending() {
        this.#pending = [];
    }

    #add(text, tokens) {
        if (!tokens.length) {
            this.root.append(text);
            return;
        }
        const span = element("span", "token", text);
        const part = Math.exp(Math.min(...tokens.map((token) => token.logprob)));
        const [colour, strength] =
            part >= 0.5 ? ["likely", (part - 0.5) * 0.5] : ["unlikely", (0.5 - part) * 0.6];
        span.style.backgroundColor = `rgba(var(--${colour}), ${strength.toFixed(3)})`;
        this.#of.set(span, tokens);
        this.root.tabIndex = 0;
        this.root.setAttribute(
            "aria-label",
            "Answer. Left and right arrows show the probabilities of its tokens.",
        );
        this.root.append(span);
    }

    #walk(event) {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const spans = [...this.#of.keys()];
        const now = spans.findIndex((span) => span.classList.contains("pointed"));
        const next = now < 0 ? (step > 0 ? 0 : spans.length - 1) : now + step;
        if (spans[next]) this.#point(spans[next]);
    }

    #point(target) {
        for (const old of this.root.querySelectorAll(".pointed")) old.classList.remove("pointed");
        const tokens = this.#of.get(target);
        const tooltip = byId("tooltip");
        tooltip.hidden = !tokens;
        if (!tokens) return;
        target.classList.add("pointed");
        tooltip.replaceChildren(...tokens.map(alternativesTable));
        place(tooltip, target);
    }
}

function alternativesTable(token) {
    const rows = token.top.map((other) => {
        const name = element("td", "", visible(other.text) || "(empty)");
        const figures = [
            element("td", "", percent(other.logprob)),
            element("td", "", other.logprob.toFixed(3)),
        ];
        return element("tr", other.isChosen ? "chosen" : "", name, ...figures);
    });
    return element("table", "", element("tbody", "", ...rows));
}

/** Below the token, or above it at the lower edge of the window. */
function place(tooltip, target) {
    const at = target.getClientRects()[0] ?? target.getBoundingClientRect();
    const { width, height } = tooltip.getBoundingClientRect();
    const fitsBelow = at.bottom + 6 + height < window.innerHeight;
    tooltip.style.left = `${Math.max(4, Math.min(at.left, window.innerWidth - width - 8))}px`;
    tooltip.style.top = `${fitsBelow ? at.bottom + 6 : Math.max(4, at.top - height - 6)}px`;
}
