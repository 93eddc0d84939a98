//! Configuration of the router process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use service::Bytes;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// Where HTTP and gRPC are served; absent: on `router.sock` in the runtime directory only. An inherited listening
    /// socket takes its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// Where workers are found.
    pub runtime_dir: PathBuf,
    /// Continuations in flight; more are refused with 429.
    #[serde(default = "streams_max")]
    pub streams_max: usize,
    /// Length of a request's body.
    #[serde(default = "body_max")]
    pub body_max: Bytes,
    /// The longest that a request may take, whatever deadline it names.
    #[serde(default = "request_timeout", with = "service::duration")]
    pub request_timeout: Duration,
    /// How long streams may go on after the request to stop.
    #[serde(default = "drain", with = "service::duration")]
    pub drain: Duration,
}

impl Config {
    /// Defaults for everything but the places.
    pub fn new(listen: Option<SocketAddr>, runtime_dir: PathBuf) -> Self {
        Self {
            listen,
            runtime_dir,
            streams_max: streams_max(),
            body_max: body_max(),
            request_timeout: request_timeout(),
            drain: drain(),
        }
    }
}

fn streams_max() -> usize {
    1024
}

/// A prompt of a million tokens as text, or of 256k token ids.
fn body_max() -> Bytes {
    Bytes::mib(8)
}

fn request_timeout() -> Duration {
    Duration::from_secs(600)
}

fn drain() -> Duration {
    Duration::from_secs(10)
}
