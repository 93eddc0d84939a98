// SPDX-License-Identifier: Apache-2.0

// The chat view: settings, requests and the conversation.

import { Answer } from "./answer.js";
import { getJson, postStream } from "./api.js";
import { byId, element, showProblem } from "./elements.js";

/** Alternatives that are asked for with each token. */
const TOP_LOGPROBS = 5;

/** The conversation as the API takes it, without the system prompt. */
let messages = [];
/** Stops the running request. */
let running = null;
/** Names of models without a chat template. */
let withoutTemplate = new Set();

export function startChat() {
    byId("send").addEventListener("click", sendInput);
    byId("stop").addEventListener("click", stop);
    byId("clear").addEventListener("click", clear);
    byId("model").addEventListener("change", fitMode);
    byId("input").addEventListener("keydown", (event) => {
        if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
        event.preventDefault();
        sendInput();
    });
    document.addEventListener("keydown", (event) => {
        if (event.key === "Escape") stop();
    });
}

/** Lists the models that the key may use. */
export async function loadModels() {
    const select = byId("model");
    const chosen = select.value;
    try {
        const [models, info] = await Promise.all([getJson("/v1/models"), getJson("/server_info")]);
        const lacking = new Set(
            info.models.filter((model) => !model.has_chat_template).map((model) => model.id),
        );
        withoutTemplate = new Set(
            models.data.filter((model) => lacking.has(model.root)).map((model) => model.id),
        );
        const options = models.data.map((model) => {
            const option = element(
                "option",
                "",
                model.workers ? model.id : `${model.id} (no worker now)`,
            );
            option.value = model.id;
            return option;
        });
        select.replaceChildren(...options);
        if (models.data.some((model) => model.id === chosen)) select.value = chosen;
        showProblem(byId("chat-problem"), models.data.length ? null : "No model is served yet.");
        fitMode();
    } catch (error) {
        select.replaceChildren();
        showProblem(byId("chat-problem"), error.message);
    }
}

/** A model without a chat template takes completions only. */
function fitMode() {
    const mode = byId("mode");
    const lacks = withoutTemplate.has(byId("model").value);
    mode.querySelector("[value=chat]").disabled = lacks;
    if (lacks) mode.value = "completion";
}

function stop() {
    running?.abort();
}

function clear() {
    stop();
    messages = [];
    byId("transcript").replaceChildren();
    byId("tooltip").hidden = true;
    showProblem(byId("chat-problem"), null);
}

async function sendInput() {
    const input = byId("input");
    const text = input.value;
    if (running || !text) return;
    if (!byId("model").value) await loadModels();
    const isChat = byId("mode").value === "chat";
    const shown = element("div", isChat ? "message user" : "message user completion");
    shown.append(element("div", "who", isChat ? "You" : "Prompt"), element("div", "text", text));
    byId("transcript").append(shown);
    input.value = "";
    const added = isChat ? [{ role: "user", content: text }] : [];
    const isKept = await (isChat ? chat(added) : complete(text));
    if (isKept) return;
    shown.remove();
    input.value ||= text;
}

/** Sends the conversation with further messages. Returns false if nothing was answered. */
async function chat(added) {
    messages.push(...added);
    let body;
    try {
        body = chatBody();
    } catch (error) {
        messages.length -= added.length;
        showProblem(byId("chat-problem"), error.message);
        return false;
    }
    const answer = new Answer(true);
    const isWhole = await run("/v1/chat/completions", body, answer, (event) =>
        answer.addChatEvent(event),
    );
    if (answer.isEmpty && !isWhole) {
        messages.length -= added.length;
        return false;
    }
    const message = { role: "assistant", content: answer.text };
    // A call that was cut has no whole arguments.
    const calls = isWhole ? answer.toolCalls : [];
    if (calls.length) message.tool_calls = calls;
    messages.push(message);
    if (calls.length) answer.askForResults((results) => chat(results));
    return true;
}

async function complete(prompt) {
    const body = { ...settings(), prompt };
    if (byId("logprobs").checked) body.logprobs = TOP_LOGPROBS;
    const answer = new Answer(false);
    const isWhole = await run("/v1/completions", body, answer, (event) =>
        answer.addCompletionEvent(event),
    );
    return isWhole || !answer.isEmpty;
}

function settings() {
    const body = {
        model: byId("model").value,
        stream: true,
        stream_options: { include_usage: true },
    };
    const [temperature, maxTokens] = [byId("temperature").value, byId("max-tokens").value];
    if (temperature !== "") body.temperature = Number(temperature);
    if (maxTokens !== "") body.max_tokens = Number(maxTokens);
    return body;
}

function chatBody() {
    const system = byId("system").value;
    const tools = byId("tools").value.trim();
    const body = settings();
    body.messages = system ? [{ role: "system", content: system }, ...messages] : [...messages];
    if (byId("logprobs").checked)
        Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
    if (!tools) return body;
    try {
        body.tools = JSON.parse(tools);
        body.tool_choice = byId("tool-choice").value;
    } catch (error) {
        throw new Error(`the tools are not JSON: ${error.message}`);
    }
    return body;
}

/** Streams an answer into the transcript. Returns whether it came to its end. */
async function run(path, body, answer, addEvent) {
    running = new AbortController();
    setRunning(true);
    showProblem(byId("chat-problem"), null);
    const transcript = byId("transcript");
    transcript.append(answer.root);
    answer.root.scrollIntoView({ block: "nearest" });
    try {
        for await (const event of postStream(path, body, running.signal)) {
            const isAtEnd =
                transcript.scrollHeight - transcript.scrollTop - transcript.clientHeight < 40;
            addEvent(event);
            if (isAtEnd) transcript.scrollTop = transcript.scrollHeight;
        }
        answer.end();
        return true;
    } catch (error) {
        const isStopped = error.name === "AbortError";
        answer.end(isStopped ? "stopped" : "failed");
        if (!isStopped) showProblem(byId("chat-problem"), error.message);
        if (answer.isEmpty) answer.root.remove();
        return false;
    } finally {
        running = null;
        setRunning(false);
    }
}

function setRunning(isRunning) {
    byId("send").disabled = isRunning;
    byId("stop").disabled = !isRunning;
}
