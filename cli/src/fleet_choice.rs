// SPDX-License-Identifier: Apache-2.0

//! Finds the fleet that a command talks to: the given one, or the only one that runs.

use std::path::Path;
use std::time::Duration;

use proto::fleet::v1::{GetStatusRequest, Status};
use service::{Exit, RuntimeDir};
use tokio::net::UnixStream;

use crate::cli_error::{CliError, CliResult};
use crate::ps;

/// How long a fleet may take to name its models.
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// Models of a fleet that a message names.
const NAMED_MODELS_MAX: usize = 8;

/// Returns the given runtime directory, or that of the only running fleet.
pub(crate) async fn find_fleet(runtime_dir: Option<&Path>) -> CliResult<RuntimeDir> {
    if let Some(path) = runtime_dir {
        return Ok(RuntimeDir::at(path));
    }
    let mut running = service::runtime_dir::running_fleets();
    match running.len() {
        1 => Ok(running.remove(0)),
        0 => Err(CliError::new(
            Exit::PeerLost,
            "no fleet of this user is running; start one with `ballast serve MODEL`",
        )),
        _ => {
            let fleets = describe_fleets(running).await.join("; ");
            let text = format!("several fleets are running: choose one with --runtime-dir: {fleets}");
            Err(CliError::new(Exit::Usage, text))
        }
    }
}

/// Asks all fleets at the same time who they are.
async fn describe_fleets(mut running: Vec<RuntimeDir>) -> Vec<String> {
    running.sort_by(|a, b| a.path().cmp(b.path()));
    let asked: Vec<_> =
        running.into_iter().map(|directory| tokio::spawn(describe_fleet(directory))).collect();
    let mut described = Vec::with_capacity(asked.len());
    for fleet in asked {
        // A description does not panic, and the runtime lives as long as this function.
        described.extend(fleet.await);
    }
    described
}

async fn describe_fleet(directory: RuntimeDir) -> String {
    let answer = tokio::time::timeout(ANSWER_WAIT, status(&directory));
    let (answer, pid) = tokio::join!(answer, supervisor_pid(&directory));
    let models = match answer.ok().flatten() {
        Some(status) => models(&status),
        None => "does not answer".to_owned(),
    };
    match pid {
        Some(pid) => format!("{} (supervisor {pid}, {models})", directory.path().display()),
        None => format!("{} ({models})", directory.path().display()),
    }
}

async fn status(directory: &RuntimeDir) -> Option<Status> {
    let mut client = ps::connect(directory).await.ok()?;
    Some(client.get_status(GetStatusRequest { memory: false, ledger: false }).await.ok()?.into_inner())
}

/// The process that listens on the supervisor's socket, also if that process is stopped.
async fn supervisor_pid(directory: &RuntimeDir) -> Option<i32> {
    let connecting = UnixStream::connect(directory.supervisor_socket());
    let stream = tokio::time::timeout(ANSWER_WAIT, connecting).await.ok()?.ok()?;
    stream.peer_cred().ok()?.pid()
}

fn models(status: &Status) -> String {
    let names: Vec<&str> = status.models.iter().map(|model| model.name.as_str()).collect();
    let named = names[..names.len().min(NAMED_MODELS_MAX)].join(", ");
    match (names.len(), names.len().saturating_sub(NAMED_MODELS_MAX)) {
        (0, _) => "no models".to_owned(),
        (1, _) => format!("model {named}"),
        (_, 0) => format!("models {named}"),
        (_, more) => format!("models {named} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_models_are_counted() {
        let status = |count: usize| {
            let model = |index| proto::fleet::v1::Model { name: format!("m{index}"), ..Default::default() };
            Status { models: (0..count).map(model).collect(), ..Status::default() }
        };
        assert_eq!(models(&status(0)), "no models");
        assert_eq!(models(&status(1)), "model m0");
        assert_eq!(models(&status(2)), "models m0, m1");
        assert!(models(&status(10)).ends_with("m7 and 2 more"), "{}", models(&status(10)));
    }
}
