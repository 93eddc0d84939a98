// SPDX-License-Identifier: Apache-2.0

//! Which models leave the memory so that another one has room. A plain value.
//!
//! Each model claims what its copies and workers take when all of them run, whether or not they run
//! already. Models that share weights claim these once.

use std::collections::{BTreeMap, BTreeSet};

use service::ByteSize;

use crate::fleet_devices::{FleetDevices, HOST, is_host_device};
use crate::spec::ModelSpec;

/// What one model takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryClaim {
    pub(crate) model: String,
    copies: Vec<CopyClaim>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct CopyClaim {
    device: String,
    /// The name of the weights at the weight-server.
    weights: String,
    weights_bytes: u64,
    workers_bytes: u64,
}

/// Memory of the devices, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceLedger {
    pub(crate) devices: BTreeMap<String, DeviceRow>,
    /// The GPUs whose memory is the host's, by their UUIDs. They have no row.
    pub(crate) unified: BTreeSet<String>,
    /// What is reserved for weights, by their name and device.
    pub(crate) weights: BTreeMap<(String, String), u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceRow {
    pub(crate) capacity: u64,
    /// By anyone, also by models that are just leaving.
    pub(crate) reserved: u64,
}

/// Why a model has no room, even if all models leave that may.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryShortage {
    device: String,
    needed: u64,
    free: u64,
    capacity: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RoomDecision {
    Fits,
    /// It fits when models that are leaving have left.
    FitsSoon,
    /// It fits without these.
    Replaces(Vec<String>),
    Lacks(MemoryShortage),
}

impl MemoryClaim {
    /// `workers_on` returns how many workers the model has on a device now; nothing if it takes
    /// nothing there.
    pub(crate) fn of(spec: &ModelSpec, workers_on: impl Fn(&str) -> Option<usize>) -> Self {
        let copies = spec.copies.iter().filter_map(|copy| {
            let workers = workers_on(&copy.device)?.max(spec.workers as usize);
            Some(CopyClaim {
                device: copy.device.clone(),
                weights: copy.weights.clone(),
                weights_bytes: copy.memory.weights_bytes,
                workers_bytes: copy.memory.worker_bytes.saturating_mul(workers as u64),
            })
        });
        Self { model: spec.name.clone(), copies: copies.collect() }
    }
}

impl DeviceLedger {
    /// Adds the GPUs of the fleet that the weight-server has not heard of: nothing is on them.
    pub(crate) fn add_unknown(&mut self, devices: &FleetDevices) {
        for gpu in devices.iter() {
            if self.unified.contains(&gpu.id) {
                continue;
            }
            match gpu.own_bytes() {
                Some(capacity) => {
                    self.devices.entry(gpu.id.clone()).or_insert(DeviceRow { capacity, reserved: 0 });
                }
                None => drop(self.unified.insert(gpu.id.clone())),
            }
        }
    }

    fn takes_host_memory(&self, device: &str) -> bool {
        is_host_device(device) || self.unified.contains(device)
    }

    fn counts_on(&self, copy: &CopyClaim, device: &str) -> bool {
        copy.device == device || (device == HOST && self.takes_host_memory(&copy.device))
    }

    /// Whether any copy of the model takes memory of the device.
    fn takes(&self, claim: &MemoryClaim, device: &str) -> bool {
        claim.copies.iter().any(|copy| self.counts_on(copy, device))
    }

    /// Whether what is on one of these devices may take memory of the other one.
    pub(crate) fn share_memory(&self, a: &str, b: &str) -> bool {
        a == b || (self.takes_host_memory(a) && self.takes_host_memory(b))
    }

    /// The sum of the claims on a device.
    fn claimed<'a>(&self, claims: impl Iterator<Item = &'a MemoryClaim>, device: &str) -> u64 {
        let mut seen = BTreeSet::new();
        let mut sum = 0u64;
        for copy in claims.flat_map(|claim| &claim.copies).filter(|copy| self.counts_on(copy, device)) {
            sum = sum.saturating_add(copy.workers_bytes);
            if seen.insert((&copy.weights, &copy.device)) {
                sum = sum.saturating_add(copy.weights_bytes);
            }
        }
        sum
    }
}

/// Decides about one model. `present` are the claims of all others that stay in memory or come into
/// it; `may_leave` names those of them that may leave, in the order in which they do.
pub(crate) fn find_room(
    new: &MemoryClaim,
    present: &[MemoryClaim],
    may_leave: &[String],
    ledger: &DeviceLedger,
) -> RoomDecision {
    let mut leaving: Vec<String> = Vec::new();
    while let Some(shortage) = shortage(new, present, &leaving, ledger) {
        let helps = |name: &&String| {
            let is_there =
                |claim: &MemoryClaim| claim.model == **name && ledger.takes(claim, &shortage.device);
            !leaving.contains(name) && present.iter().any(is_there)
        };
        match may_leave.iter().find(helps) {
            Some(next) => leaving.push(next.clone()),
            None => return RoomDecision::Lacks(shortage),
        }
    }
    if leaving.is_empty() {
        return match is_reserved(new, present, ledger) {
            true => RoomDecision::FitsSoon,
            false => RoomDecision::Fits,
        };
    }
    // A large model that left last may have made room for a small one before it.
    for name in leaving.clone().into_iter().rev() {
        let others: Vec<String> = leaving.iter().filter(|other| **other != name).cloned().collect();
        if shortage(new, present, &others, ledger).is_none() {
            leaving = others;
        }
    }
    RoomDecision::Replaces(leaving)
}

/// The first device on which the model does not fit beside those that stay.
fn shortage(
    new: &MemoryClaim,
    present: &[MemoryClaim],
    leaving: &[String],
    ledger: &DeviceLedger,
) -> Option<MemoryShortage> {
    let staying = || present.iter().filter(|claim| !leaving.contains(&claim.model));
    let concerned = ledger.devices.iter().filter(|(device, _)| ledger.takes(new, device));
    concerned
        .map(|(device, row)| {
            let others = ledger.claimed(staying(), device);
            MemoryShortage {
                device: device.clone(),
                needed: ledger.claimed(staying().chain([new]), device) - others,
                free: row.capacity.saturating_sub(others),
                capacity: row.capacity,
            }
        })
        .find(|shortage| shortage.needed > shortage.free)
}

/// Whether more is reserved than the present models claim, and the new one needs it.
fn is_reserved(new: &MemoryClaim, present: &[MemoryClaim], ledger: &DeviceLedger) -> bool {
    ledger.devices.iter().filter(|(device, _)| ledger.takes(new, device)).any(|(device, row)| {
        let others = ledger.claimed(present.iter(), device);
        let needed = ledger.claimed(present.iter().chain([new]), device) - others;
        // A weight-server that has kept its weights has those of the new model already.
        let own = new.copies.iter().filter(|copy| ledger.counts_on(copy, device));
        let own = own.filter_map(|copy| ledger.weights.get(&(copy.weights.clone(), copy.device.clone())));
        let reserved = row.reserved.saturating_sub(own.sum());
        reserved > others && needed > row.capacity.saturating_sub(reserved)
    })
}

impl std::fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rounded = |bytes: u64| ByteSize(bytes).rounded();
        write!(
            f,
            "{} are needed on {}, and {} of {} are free without the models that may leave: unload a model, \
             give workers less, or raise the budget",
            rounded(self.needed),
            self.device,
            rounded(self.free),
            rounded(self.capacity)
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn claim(model: &str, copies: &[(&str, &str, u64, u64)]) -> MemoryClaim {
        let copy = |&(device, weights, weights_bytes, workers_bytes): &(&str, &str, u64, u64)| CopyClaim {
            device: device.to_owned(),
            weights: weights.to_owned(),
            weights_bytes,
            workers_bytes,
        };
        MemoryClaim { model: model.to_owned(), copies: copies.iter().map(copy).collect() }
    }

    fn ledger(rows: &[(&str, u64, u64)]) -> DeviceLedger {
        let row = |&(device, capacity, reserved): &(&str, u64, u64)| {
            (device.to_owned(), DeviceRow { capacity, reserved })
        };
        let devices = rows.iter().map(row).collect();
        DeviceLedger { devices, ..DeviceLedger::default() }
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_model_replaces_the_first_that_may_leave_and_as_few_as_it_needs() {
        let present = [
            claim("small", &[("gpu", "small", 10, 5)]),
            claim("large", &[("gpu", "large", 40, 20)]),
            claim("kept", &[("gpu", "kept", 10, 5)]),
        ];
        let decide = |bytes, order: &[&str]| {
            let new = claim("new", &[("gpu", "new", bytes, 0)]);
            find_room(&new, &present, &names(order), &ledger(&[("gpu", 100, 90)]))
        };
        assert_eq!(decide(10, &["small", "large"]), RoomDecision::Fits);
        assert_eq!(decide(11, &["small", "large"]), RoomDecision::Replaces(names(&["small"])));
        assert_eq!(decide(11, &["large", "small"]), RoomDecision::Replaces(names(&["large"])));
        assert_eq!(decide(60, &["small", "large"]), RoomDecision::Replaces(names(&["large"])));
        assert_eq!(decide(80, &["small", "large"]), RoomDecision::Replaces(names(&["small", "large"])));
        let RoomDecision::Lacks(shortage) = decide(90, &["small", "large"]) else { panic!("it has room") };
        assert_eq!((shortage.needed, shortage.free, shortage.capacity), (90, 85, 100));
    }

    #[test]
    fn weights_that_stay_with_another_model_make_no_room_and_need_none() {
        let shared = |model, workers| claim(model, &[("host", "w", 60, workers)]);
        let present = [shared("a", 10), shared("b", 10)];
        let at = ledger(&[("host", 100, 80)]);
        assert_eq!(find_room(&shared("c", 20), &present, &[], &at), RoomDecision::Fits);
        let new = claim("new", &[("host", "new", 40, 0)]);
        let both = RoomDecision::Replaces(names(&["a", "b"]));
        assert_eq!(find_room(&new, &present, &names(&["a", "b"]), &at), both);
        assert!(matches!(find_room(&new, &present, &names(&["a"]), &at), RoomDecision::Lacks(_)));
    }

    #[test]
    fn a_node_counts_on_the_host_and_only_devices_of_the_model_count() {
        let present = [claim("node", &[("host:1", "node", 50, 0)]), claim("gpu", &[("gpu", "g", 90, 0)])];
        let at = ledger(&[("gpu", 100, 90), ("host", 80, 50), ("host:0", 60, 0), ("host:1", 60, 50)]);
        let on = |device, bytes| claim("new", &[(device, "new", bytes, 0)]);
        let decide = |device, bytes| find_room(&on(device, bytes), &present, &names(&["gpu", "node"]), &at);
        assert_eq!(decide("host", 30), RoomDecision::Fits);
        assert_eq!(decide("host:0", 30), RoomDecision::Fits);
        assert_eq!(decide("host:0", 31), RoomDecision::Replaces(names(&["node"])));
        assert_eq!(decide("gpu", 11), RoomDecision::Replaces(names(&["gpu"])));
    }

    #[test]
    fn models_on_the_host_and_on_a_gpu_with_unified_memory_leave_for_each_other() {
        let present = [claim("gpu", &[("unified", "g", 50, 10)]), claim("host", &[("host", "h", 20, 0)])];
        let mut at = ledger(&[("discrete", 100, 0), ("host", 100, 80)]);
        at.unified.insert("unified".to_owned());
        let on = |device, bytes| claim("new", &[(device, "new", bytes, 0)]);
        let decide = |device, bytes| find_room(&on(device, bytes), &present, &names(&["gpu", "host"]), &at);
        for device in ["host", "unified", "host:0"] {
            assert_eq!(decide(device, 20), RoomDecision::Fits, "{device}");
            assert_eq!(decide(device, 21), RoomDecision::Replaces(names(&["gpu"])), "{device}");
            assert!(at.share_memory("unified", device), "{device}");
        }
        assert_eq!(decide("discrete", 100), RoomDecision::Fits);
        assert!(!at.share_memory("unified", "discrete"));
    }

    #[test]
    fn what_leaving_models_still_hold_is_waited_for() {
        let present = [claim("a", &[("host", "a", 30, 0)])];
        let new = claim("new", &[("host", "new", 60, 0)]);
        let decide = |reserved| find_room(&new, &present, &[], &ledger(&[("host", 100, reserved)]));
        assert_eq!(decide(40), RoomDecision::Fits);
        assert_eq!(decide(41), RoomDecision::FitsSoon);
        // "a" has not taken all of its claim yet.
        assert_eq!(decide(0), RoomDecision::Fits);
        let mut resident = ledger(&[("host", 100, 90)]);
        resident.weights.insert(("new".to_owned(), "host".to_owned()), 60);
        assert_eq!(find_room(&new, &present, &[], &resident), RoomDecision::Fits);
    }

    proptest! {
        #[test]
        fn models_leave_only_for_one_that_fits_then_and_none_without_need(
            sizes in proptest::collection::vec((1u64..40, 0usize..3), 1..8),
            (need, capacity) in (1u64..120, 1u64..160),
            stays in 0usize..8,
        ) {
            let weights = ["x", "y", "z"];
            let present: Vec<MemoryClaim> = sizes
                .iter()
                .enumerate()
                .map(|(at, (bytes, shared))| {
                    // The weights of one name have one size.
                    let weight_bytes = 7 * (*shared as u64 + 1);
                    claim(&at.to_string(), &[("d", weights[*shared], weight_bytes, *bytes)])
                })
                .collect();
            let may_leave: Vec<String> =
                (0..sizes.len()).filter(|at| *at != stays).map(|at| at.to_string()).collect();
            let new = claim("new", &[("d", "new", need, 0)]);
            let at = ledger(&[("d", capacity, 0)]);
            let fits_without = |leaving: &[String]| shortage(&new, &present, leaving, &at).is_none();
            match find_room(&new, &present, &may_leave, &at) {
                RoomDecision::Fits => prop_assert!(fits_without(&[])),
                RoomDecision::FitsSoon => prop_assert!(false, "nothing is reserved"),
                RoomDecision::Lacks(_) => prop_assert!(!fits_without(&may_leave)),
                RoomDecision::Replaces(leaving) => {
                    prop_assert!(!fits_without(&[]) && fits_without(&leaving));
                    for name in &leaving {
                        prop_assert!(may_leave.contains(name));
                        let others: Vec<String> = leaving.iter().filter(|l| *l != name).cloned().collect();
                        prop_assert!(!fits_without(&others), "{name} leaves without need");
                    }
                }
            }
        }
    }
}
