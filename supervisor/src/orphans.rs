// SPDX-License-Identifier: Apache-2.0

//! What a living process of a dead supervisor becomes in the fleet of its successor. A plain
//! function.

use crate::spec::WorkerSlot;

/// The device of a worker whose configuration names none.
const DEFAULT_DEVICE: &str = "host";

/// The place of an orphan in the fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrphanPlace {
    /// The process of a child of this fleet. `is_outdated`: it was started with another
    /// configuration, so it restarts after its adoption.
    Child { is_outdated: bool },
    /// A worker that the configuration does not list. It was added while the dead supervisor ran,
    /// or its model has left the configuration.
    RecordedWorker { index: u32 },
    /// Not of this fleet: it is terminated.
    Foreign,
}

/// `configured` is the configuration of the child with this name, `recorded` that with which a
/// worker was started.
pub fn place_orphan(
    name: &str,
    configured: Option<&toml::Table>,
    recorded: Option<&toml::Table>,
) -> OrphanPlace {
    match (configured, worker_index(name), recorded) {
        (Some(configured), _, recorded) => {
            OrphanPlace::Child { is_outdated: recorded.is_some_and(|recorded| recorded != configured) }
        }
        (None, Some(index), Some(_)) => OrphanPlace::RecordedWorker { index },
        (None, _, _) => OrphanPlace::Foreign,
    }
}

pub(crate) fn worker_index(name: &str) -> Option<u32> {
    name.strip_prefix("worker-")?.parse().ok()
}

/// What the worker with this configuration serves.
pub fn slot_of_worker(index: u32, config: &toml::Table) -> WorkerSlot {
    let text = |key: &str| config.get(key).and_then(toml::Value::as_str).map(str::to_owned);
    let weights = text("model").unwrap_or_default();
    let device = text("device").unwrap_or_else(|| DEFAULT_DEVICE.to_owned());
    WorkerSlot { index, model: text("served-model").unwrap_or(weights.clone()), weights, device }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orphans_are_placed_by_name_and_configuration() {
        let config = |model: &str| -> toml::Table { format!("model = {model:?}").parse().unwrap() };
        let (a, b) = (config("a"), config("b"));
        let child = |is_outdated| OrphanPlace::Child { is_outdated };
        assert_eq!(place_orphan("worker-0", Some(&a), Some(&a)), child(false));
        assert_eq!(place_orphan("worker-0", Some(&a), Some(&b)), child(true));
        assert_eq!(place_orphan("router", Some(&a), None), child(false));
        assert_eq!(place_orphan("worker-7", None, Some(&b)), OrphanPlace::RecordedWorker { index: 7 });
        assert_eq!(place_orphan("mps", None, None), OrphanPlace::Foreign);
        let slot = |model: &str, weights: &str| WorkerSlot {
            index: 3,
            model: model.to_owned(),
            weights: weights.to_owned(),
            device: "host".to_owned(),
        };
        assert_eq!(slot_of_worker(3, &b), slot("b", "b"));
        let shared = "model = \"a\"\nserved-model = \"b\"".parse().unwrap();
        assert_eq!(slot_of_worker(3, &shared), slot("b", "a"));
        let elsewhere = "model = \"b\"\ndevice = \"host:1\"".parse().unwrap();
        assert_eq!(slot_of_worker(3, &elsewhere).device, "host:1");
    }
}
