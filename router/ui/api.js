// SPDX-License-Identifier: Apache-2.0

// Calls of this router's API. The key is kept for this tab, and sent in a header, never in a URL.

const KEY = "ballast-api-key";

export const apiKey = {
    get: () => sessionStorage.getItem(KEY) ?? "",
    set: (key) => sessionStorage.setItem(KEY, key),
};

/** An answer of the API that is an error, with its message. */
export class ApiError extends Error {
    constructor(status, message, retryAfterSeconds) {
        super(message);
        this.status = status;
        this.retryAfterSeconds = retryAfterSeconds;
    }
}

async function call(path, options) {
    const headers = { ...options.headers };
    if (apiKey.get()) headers.authorization = `Bearer ${apiKey.get()}`;
    let reply;
    try {
        reply = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError(0, "the router does not answer");
    }
    if (!reply.ok) throw await errorOf(reply);
    return reply;
}

async function errorOf(reply) {
    const text = await reply.text();
    let message = text.slice(0, 500) || reply.statusText;
    try {
        message = JSON.parse(text).error.message;
    } catch {
        // Not an error of the API: the text stays.
    }
    if (reply.status === 401) message = `${message}. Type an API key at the top of the page.`;
    const pause = Number(reply.headers.get("retry-after")) || 0;
    return new ApiError(reply.status, message, pause);
}

/** A router that restarts answers after some seconds. */
const ANSWER_MS = 10_000;

export async function getJson(path) {
    return (await call(path, { signal: AbortSignal.timeout(ANSWER_MS) })).json();
}

/** Posts a request with `stream`, and yields the JSON of each server-sent event. */
export async function* postStream(path, body, signal) {
    const reply = await call(path, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
        signal,
    });
    for await (const data of eventData(reply.body)) {
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(reply.status, event.error.message, 0);
        yield event;
    }
    throw new ApiError(reply.status, "the stream was cut: the answer is not complete", 0);
}

/** The data of the events of a stream. Events end with an empty line. */
async function* eventData(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    try {
        for (;;) {
            const { done, value } = await reader.read();
            if (done) return;
            const events = (rest + value.replaceAll("\r", "")).split("\n\n");
            rest = events.pop();
            for (const event of events) {
                const lines = event.split("\n").filter((line) => line.startsWith("data:"));
                if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
            }
        }
    } finally {
        reader.cancel().catch(() => {});
    }
}
