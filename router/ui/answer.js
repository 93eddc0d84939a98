// SPDX-License-Identifier: Apache-2.0

// An answer that grows while its events arrive: reasoning, text with its tokens, tool calls, and at
// its end what it took.

import { count, element, seconds } from "./elements.js";
import { TokenText, tokensOfChat, tokensOfCompletion } from "./tokens.js";

export class Answer {
    text = "";
    /** As a message of the API holds them, in their order. */
    toolCalls = [];
    #reasoning = null;
    #blocks = [];
    #finish = "";
    #usage = null;
    #began = performance.now();
    #first = 0;
    #last = 0;

    constructor(isChat) {
        this.#tokens = new TokenText();
        this.#body = element("div", "body", this.#tokens.root);
        this.#end = element("div", "end");
        const kind = isChat ? "message assistant running" : "message assistant running completion";
        this.root = element(
            "div",
            kind,
            element("div", "who", isChat ? "Assistant" : "Completion"),
            this.#body,
            this.#end,
        );
    }

    #tokens;
    #body;
    #end;

    get isEmpty() {
        return !this.text && !this.#reasoning && !this.toolCalls.length;
    }

    /** An event of `/v1/chat/completions`. */
    addChatEvent(event) {
        this.#usage = event.usage ?? this.#usage;
        const choice = event.choices?.[0];
        if (!choice) return;
        const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
        if (content || reasoning || calls) this.#mark();
        if (reasoning) this.#addReasoning(reasoning);
        for (const call of calls ?? []) this.#addToolCall(call);
        const tokens = reasoning || calls ? [] : tokensOfChat(choice.logprobs);
        if (reasoning || calls) this.#tokens.dropPending();
        this.#addText(content ?? "", tokens);
        this.#finish = choice.finish_reason ?? this.#finish;
    }

    /** An event of `/v1/completions`. */
    addCompletionEvent(event) {
        this.#usage = event.usage ?? this.#usage;
        const choice = event.choices?.[0];
        if (!choice) return;
        if (choice.text) this.#mark();
        this.#addText(choice.text ?? "", tokensOfCompletion(choice.logprobs));
        this.#finish = choice.finish_reason ?? this.#finish;
    }

    #mark() {
        this.#last = performance.now();
        this.#first ||= this.#last;
    }

    #addText(text, tokens) {
        this.text += text;
        this.#tokens.append(text, tokens);
    }

    #addReasoning(text) {
        if (!this.#reasoning) {
            this.#reasoning = element("span", "");
            const block = element(
                "details",
                "reasoning",
                element("summary", "", "Reasoning"),
                this.#reasoning,
            );
            this.#body.prepend(block);
        }
        this.#reasoning.append(text);
    }

    #addToolCall(part) {
        const index = part.index ?? 0;
        const call = (this.toolCalls[index] ??= {
            id: "",
            type: "function",
            function: { name: "", arguments: "" },
        });
        call.id ||= part.id ?? "";
        call.function.name += part.function?.name ?? "";
        call.function.arguments += part.function?.arguments ?? "";
        const block = (this.#blocks[index] ??= this.#newBlock());
        block.name.textContent = call.function.name;
        block.arguments.textContent = call.function.arguments;
    }

    #newBlock() {
        const [name, shown] = [element("span", "name"), element("pre", "code")];
        const root = element(
            "div",
            "tool-call",
            element("span", "faint", "Tool call "),
            name,
            shown,
        );
        this.#body.append(root);
        return { root, name, arguments: shown };
    }

    /** A field for the result of each tool call, and a button that calls `send` with all. */
    askForResults(send) {
        const fields = this.#blocks.map((block) => {
            const field = element("textarea", "code");
            field.rows = 2;
            block.root.append(element("label", "", "Result ", field));
            return field;
        });
        const button = element("button", "", "Send results");
        button.addEventListener("click", () => {
            button.remove();
            fields.forEach((field) => (field.readOnly = true));
            send(
                fields.map((field, index) => ({
                    role: "tool",
                    tool_call_id: this.toolCalls[index].id,
                    content: field.value,
                })),
            );
        });
        this.#body.append(button);
    }

    /** Ends the answer. `note` says why, if it is not the model's doing. */
    end(note) {
        this.root.classList.remove("running");
        const parts = [note ?? this.#finish];
        const written = this.#usage?.completion_tokens;
        if (this.#usage)
            parts.push(`${this.#usage.prompt_tokens} prompt tokens`, `${written} tokens`);
        if (this.#first)
            parts.push(`first token after ${seconds((this.#first - this.#began) / 1000)}`);
        const took = (this.#last - this.#first) / 1000;
        if (written > 1 && took > 0) parts.push(`${count((written - 1) / took)} tokens/s`);
        this.#end.textContent = parts.filter(Boolean).join(" · ");
    }
}
