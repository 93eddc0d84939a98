// SPDX-License-Identifier: Apache-2.0

// Ties the views together: tabs, the key, and when the fleet is asked for.

import { apiKey } from "./api.js";
import { loadModels, startChat } from "./chat.js";
import { byId } from "./elements.js";
import { showFleet } from "./fleet.js";

const VIEWS = ["chat", "fleet"];

function show(view) {
    for (const name of VIEWS) {
        const isShown = name === view;
        byId(`view-${name}`).hidden = !isShown;
        byId(`tab-${name}`).setAttribute("aria-selected", String(isShown));
        byId(`tab-${name}`).tabIndex = isShown ? 0 : -1;
    }
    byId("tooltip").hidden = true;
    history.replaceState(null, "", `#${view}`);
    showFleet(view === "fleet");
}

function startTabs() {
    for (const name of VIEWS) {
        byId(`tab-${name}`).addEventListener("click", () => show(name));
        byId(`tab-${name}`).addEventListener("keydown", (event) => {
            if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
            const other = VIEWS[(VIEWS.indexOf(name) + 1) % VIEWS.length];
            show(other);
            byId(`tab-${other}`).focus();
        });
    }
}

const key = byId("key");
key.value = apiKey.get();
byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey();
});
key.addEventListener("change", useKey);

function useKey() {
    apiKey.set(key.value.trim());
    loadModels();
    showFleet(!byId("view-fleet").hidden);
}

startTabs();
startChat();
loadModels();
show(location.hash === "#fleet" ? "fleet" : "chat");
