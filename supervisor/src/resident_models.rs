// SPDX-License-Identifier: Apache-2.0

//! What a supervisor does about the generations that a weight-server holds: which of them is the
//! model's, which are unloaded, and which workers have to restart. Plain functions on the
//! weight-server's status.

use bytes::Bytes;
use proto::weights::v1 as wire;

/// Older generations of a model.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct OlderGenerations {
    /// Those that still have the model's name.
    pub to_unload: Vec<u64>,
    /// Process ids of the workers that hold any of them.
    pub readers: Vec<u32>,
}

/// The models that are not of this fleet, among those that the weight-server names.
pub fn leftovers(resident: Vec<String>, is_of_fleet: impl Fn(&str) -> bool) -> Vec<String> {
    resident.into_iter().filter(|name| !is_of_fleet(name)).collect()
}

/// The names of the models that the weight-server holds or loads.
pub fn resident_names(status: &wire::Status) -> Vec<String> {
    let named = status.generations.iter().filter(|generation| !is_retiring(generation));
    let mut names: Vec<String> = named.map(|generation| generation.model.clone()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The generation with the digest that the model is known to have.
pub fn find_known<'a>(
    status: &'a wire::Status,
    model: &str,
    device: &str,
    digest: &Bytes,
) -> Option<&'a wire::Generation> {
    status.generations.iter().find(|generation| {
        generation.model == model
            && generation.device == device
            && generation.digest == *digest
            && generation.state() == wire::GenerationState::Ready
    })
}

/// The generations of the model other than `current`, which replaces them. Without `current`: all
/// of them.
pub fn older_generations(status: &wire::Status, model: &str, current: Option<u64>) -> OlderGenerations {
    let is_older = |generation: &&wire::Generation| {
        generation.model == model && current.is_none_or(|current| generation.generation != current)
    };
    let older: Vec<&wire::Generation> = status.generations.iter().filter(is_older).collect();
    let named = older.iter().filter(|generation| !is_retiring(generation));
    let reads_older = |lease: &&wire::Lease| older.iter().any(|g| g.generation == lease.generation);
    let readers = status.leases.iter().filter(reads_older);
    OlderGenerations {
        to_unload: named.map(|generation| generation.generation).collect(),
        readers: readers.filter_map(|lease| u32::try_from(lease.pid).ok()).collect(),
    }
}

fn is_retiring(generation: &wire::Generation) -> bool {
    generation.state() == wire::GenerationState::Retiring
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_of_older_generations_restart_and_named_ones_are_unloaded() {
        let generation = |number, model: &str, state: wire::GenerationState| wire::Generation {
            generation: number,
            model: model.to_owned(),
            state: state.into(),
            ..Default::default()
        };
        let lease = |pid, generation| wire::Lease { pid, generation, ..Default::default() };
        let status = wire::Status {
            generations: vec![
                generation(1, "m", wire::GenerationState::Retiring),
                generation(2, "m", wire::GenerationState::Ready),
                generation(3, "m", wire::GenerationState::Ready),
                generation(4, "other", wire::GenerationState::Ready),
            ],
            leases: vec![lease(11, 1), lease(12, 2), lease(13, 3), lease(14, 4)],
            ..Default::default()
        };
        let expected = OlderGenerations { to_unload: vec![2], readers: vec![11, 12] };
        assert_eq!(older_generations(&status, "m", Some(3)), expected);
        let all = OlderGenerations { to_unload: vec![2, 3], readers: vec![11, 12, 13] };
        assert_eq!(older_generations(&status, "m", None), all);
        assert_eq!(resident_names(&status), ["m", "other"]);
        assert_eq!(leftovers(resident_names(&status), |name| name == "m"), ["other"]);
    }
}
