// SPDX-License-Identifier: Apache-2.0

//! The OpenAI-compatible API, as a client uses it.

use serde_json::Value;

use super::ServedFleet;
use super::api::runtime;

/// A client of one fleet, with blocking calls for tests.
pub(crate) struct HttpClient {
    pub(crate) runtime: tokio::runtime::Runtime,
    pub(crate) client: reqwest::Client,
    pub(crate) url: String,
}

impl HttpClient {
    pub(crate) fn connect(fleet: &ServedFleet) -> HttpClient {
        HttpClient { runtime: runtime(), client: reqwest::Client::new(), url: fleet.http.clone() }
    }

    pub(crate) fn get(&self, path: &str) -> (u16, String) {
        self.runtime.block_on(async {
            let reply = self.client.get(format!("{}{path}", self.url)).send().await.unwrap();
            (reply.status().as_u16(), reply.text().await.unwrap())
        })
    }

    /// Status of a GET; `None` while nothing listens.
    pub(crate) fn try_get(&self, path: &str) -> Option<u16> {
        let request = self.client.get(format!("{}{path}", self.url)).send();
        self.runtime.block_on(request).ok().map(|reply| reply.status().as_u16())
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, String) {
        self.runtime.block_on(async {
            let request = self.client.post(format!("{}{path}", self.url)).json(body);
            let reply = request.send().await.unwrap();
            (reply.status().as_u16(), reply.text().await.unwrap())
        })
    }

    pub(crate) fn post_json(&self, path: &str, body: &Value) -> Value {
        let (status, text) = self.post(path, body);
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).unwrap()
    }

    /// Returns the data of all server-sent events, after checking that the last one is [DONE].
    pub(crate) fn post_stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, text) = self.post(path, body);
        assert_eq!(status, 200, "{text}");
        let mut events: Vec<&str> =
            text.split("\n\n").filter_map(|event| event.trim().strip_prefix("data: ")).collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{text}");
        events.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    /// Value of a metric; `None` until the router reports it.
    pub(crate) fn metric(&self, name: &str) -> Option<f64> {
        let metrics = self.get("/metrics").1;
        let line = metrics.lines().find(|line| line.starts_with(name))?;
        line.rsplit(' ').next()?.parse().ok()
    }
}
