// SPDX-License-Identifier: Apache-2.0

//! What the fleet holds: ledger rows, memfds, descriptors, sockets and processes.

use super::soak_fleet::SoakFleet;
use crate::harness::admin::try_weight_server_status;
use crate::harness::api::runtime;
use crate::harness::{device, eventually, proc};

/// Descriptors by which a process may differ from its predecessor: connections that are being
/// closed or opened.
const DESCRIPTOR_SLACK: usize = 8;

#[derive(Debug, PartialEq)]
pub(super) struct Holdings {
    generations: Vec<String>,
    reserved_bytes: u64,
    weight_bytes: u64,
    /// Of supervisor and weight-server, which keep the descriptors of the weights.
    descriptors: Vec<usize>,
    /// Roles of the processes.
    processes: Vec<String>,
    sockets: Vec<String>,
}

impl Holdings {
    pub(super) fn of(soak: &SoakFleet) -> Self {
        let status = eventually("the weight-server answers", || {
            runtime().block_on(try_weight_server_status(&soak.fleet))
        });
        let mark = format!("{}/", soak.runtime_dir().display());
        let mut pids = proc::processes_with_argument(&mark);
        pids.push(soak.fleet.supervisor.id());
        let mut generations: Vec<String> = status.generations.into_iter().map(|one| one.model).collect();
        generations.sort();
        let role = |&pid: &u32| proc::arguments(pid).get(1).cloned().unwrap_or_default();
        let mut processes: Vec<String> = pids.iter().map(role).collect();
        processes.sort();
        let entries = std::fs::read_dir(soak.runtime_dir()).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut sockets: Vec<String> = names.filter(|name| name.ends_with(".sock")).collect();
        sockets.sort();
        let keepers = ["supervisor", "weight-server"].iter().flat_map(|role| soak.pids(role));
        Self {
            generations,
            reserved_bytes: status.ledger.unwrap().reserved_bytes,
            weight_bytes: if device() == "host" { proc::weight_memfd_bytes(&pids) } else { 0 },
            descriptors: keepers.map(|pid| proc::open_files(pid).len()).collect(),
            processes,
            sockets,
        }
    }

    pub(super) fn is_within(&self, before: &Self) -> bool {
        let few = |(now, before): (&usize, &usize)| *now <= before + DESCRIPTOR_SLACK;
        self.descriptors.iter().zip(&before.descriptors).all(few)
            && self.descriptors.len() == before.descriptors.len()
            && (&self.generations, self.reserved_bytes, self.weight_bytes)
                == (&before.generations, before.reserved_bytes, before.weight_bytes)
            && (&self.processes, &self.sockets) == (&before.processes, &before.sockets)
    }
}
