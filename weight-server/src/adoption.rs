// SPDX-License-Identifier: Apache-2.0

//! Adopts what an earlier incarnation left in the FD store: sorts the descriptors into generations
//! and leases and checks them.
//!
//! The manifest's descriptor is the commit record of a generation, and the lease record that of a
//! lease. Without its commit record, or with a descriptor that does not match it, a generation or
//! lease is dropped. Adoption reads no model file.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use handoff::lease_record::{LeaseRecord, LeaseRecordError};
use handoff::pidfd;
use memory::memfd::SealedMemfd;
use service::listen::InheritedFd;

use crate::catalog::{GenerationContents, LoadKey};
use crate::events::AdoptedGeneration;
use crate::held_fds::{GenerationFds, GenerationFdsError, LeaseFds};
use crate::stored_fds::{SortedFds, StoredFdName, StoredGeneration, StoredLease, sort_stored};

#[derive(Debug, Default)]
pub(crate) struct AdoptedState {
    pub(crate) generations: Vec<(AdoptedGeneration, Arc<GenerationFds>)>,
    pub(crate) leases: Vec<(LeaseRecord, LeaseFds)>,
    /// Names of dropped descriptors, which the FD store must remove.
    pub(crate) names_to_remove: Vec<String>,
    /// The reasons, for the log and for `ballast ps`.
    pub(crate) notes: Vec<AdoptionNote>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdoptionNote {
    #[error("generation {generation} was dropped: allocation {index} is missing")]
    MissingAllocation { generation: u64, index: usize },
    #[error("generation {generation} was dropped")]
    Generation { generation: u64, source: GenerationFdsError },
    #[error("generation {generation} was dropped: its manifest names generation {found}")]
    WrongGeneration { generation: u64, found: u64 },
    #[error("lease {lease} was dropped")]
    LeaseRecord { lease: u64, source: LeaseRecordError },
    #[error("lease {lease} was dropped: its record names lease {found}")]
    WrongLease { lease: u64, found: u64 },
    #[error("lease {lease} was dropped: generation {generation} is gone")]
    LeaseWithoutGeneration { lease: u64, generation: u64 },
    #[error("lease {lease} has ended: its worker is gone")]
    WorkerGone { lease: u64 },
    #[error("descriptor {name} is not a known one and was closed")]
    Unrecognized { name: String },
}

/// Sorts and checks all descriptors. Those that it does not return are closed.
pub(crate) fn adopt(inherited: Vec<InheritedFd>) -> AdoptedState {
    let SortedFds { generations, leases, unrecognized } =
        sort_stored(inherited.into_iter().map(|InheritedFd { name, fd }| (name, fd)));
    let mut adopted = AdoptedState::default();
    for name in unrecognized {
        adopted.reject_unrecognized(name);
    }
    for (generation, parts) in generations {
        adopted.add_generation(generation, parts);
    }
    for (lease, parts) in leases {
        adopted.add_lease(lease, parts);
    }
    adopted
}

impl AdoptedState {
    fn reject_unrecognized(&mut self, name: String) {
        self.names_to_remove.push(name.clone());
        self.notes.push(AdoptionNote::Unrecognized { name });
    }

    fn add_generation(&mut self, id: u64, parts: StoredGeneration<OwnedFd>) {
        let names = parts.names(id);
        match read_generation(id, parts) {
            Ok(generation) => self.generations.push(generation),
            Err(note) => {
                self.notes.push(note);
                self.names_to_remove.extend(names);
            }
        }
    }

    fn add_lease(&mut self, id: u64, parts: StoredLease<OwnedFd>) {
        let had_pidfd = parts.pidfd.is_some();
        match self.read_lease(id, parts.record, parts.pidfd) {
            Ok(lease) => self.leases.push(lease),
            Err(note) => {
                self.notes.push(note);
                self.names_to_remove.push(StoredFdName::Record { lease: id }.to_string());
                self.names_to_remove.extend(had_pidfd.then(|| StoredFdName::Pidfd { lease: id }.to_string()));
            }
        }
    }

    fn read_lease(
        &self,
        id: u64,
        record: OwnedFd,
        pidfd: Option<OwnedFd>,
    ) -> Result<(LeaseRecord, LeaseFds), AdoptionNote> {
        let failed = |source| AdoptionNote::LeaseRecord { lease: id, source };
        let memfd = SealedMemfd::verify(record).map_err(|error| failed(error.into()))?;
        let record = LeaseRecord::from_memfd(&memfd).map_err(failed)?;
        if record.lease != id {
            return Err(AdoptionNote::WrongLease { lease: id, found: record.lease });
        }
        if !self.generations.iter().any(|(generation, _)| generation.id == record.generation) {
            return Err(AdoptionNote::LeaseWithoutGeneration { lease: id, generation: record.generation });
        }
        let pidfd = open_live_process(&record, pidfd).ok_or(AdoptionNote::WorkerGone { lease: id })?;
        Ok((record, LeaseFds { record: Arc::new(memfd), pidfd: Arc::new(pidfd) }))
    }
}

fn read_generation(
    id: u64,
    parts: StoredGeneration<OwnedFd>,
) -> Result<(AdoptedGeneration, Arc<GenerationFds>), AdoptionNote> {
    let retired = parts.is_retired;
    let missing = |index| AdoptionNote::MissingAllocation { generation: id, index };
    let fds = parts.into_ordered().map_err(missing)?;
    let (generation, fds) =
        read_returned(fds).map_err(|source| AdoptionNote::Generation { generation: id, source })?;
    if generation.id != id {
        return Err(AdoptionNote::WrongGeneration { generation: id, found: generation.id });
    }
    Ok((AdoptedGeneration { retired, ..generation }, fds))
}

/// Reads a generation that a worker has sent back: the manifest first, then every allocation.
pub(crate) fn read_returned(
    fds: Vec<OwnedFd>,
) -> Result<(AdoptedGeneration, Arc<GenerationFds>), GenerationFdsError> {
    let (manifest, fds) = GenerationFds::verify(fds)?;
    let contents = GenerationContents::from_manifest(&manifest, fds.manifest());
    let device = manifest.devices.first().map(|device| device.id.clone()).unwrap_or_default();
    let key = LoadKey {
        files: manifest.files,
        device,
        layout: manifest.layout,
        one_per_tensor: manifest.one_per_tensor,
    };
    let (id, model) = (manifest.generation, manifest.model);
    Ok((AdoptedGeneration { id, model, key, contents, retired: false }, Arc::new(fds)))
}

/// Returns a pidfd of the lease's worker, if the worker is still alive.
fn open_live_process(record: &LeaseRecord, stored: Option<OwnedFd>) -> Option<OwnedFd> {
    let pidfd = match stored {
        Some(pidfd) => pidfd,
        // systemd stores equal descriptors once, so of two leases of one process only one has the
        // pidfd.
        None => {
            let same = pidfd::start_ticks(record.pid) == Some(record.pid_start_ticks);
            same.then(|| pidfd::open(record.pid).ok()).flatten()?
        }
    };
    // The start time is read after the pidfd is open: a process id is not reused while its process
    // is known to live.
    let alive = !pidfd::has_ended(&pidfd.as_fd()).unwrap_or(true);
    let same = pidfd::start_ticks(record.pid) == Some(record.pid_start_ticks) || record.pid_start_ticks == 0;
    (alive && same).then_some(pidfd)
}

#[cfg(test)]
mod tests {
    use memory::manifest::{Allocation, Manifest, ManifestDevice};

    use super::*;

    fn inherited(name: &str, fd: impl Into<OwnedFd>) -> InheritedFd {
        InheritedFd { name: name.to_owned(), fd: fd.into() }
    }

    fn owned(memfd: &SealedMemfd) -> OwnedFd {
        memfd.as_fd().try_clone_to_owned().unwrap()
    }

    /// A generation with two allocations, as its descriptors come from the FD store.
    fn generation(id: u64) -> Vec<InheritedFd> {
        let allocations = [vec![1u8; 4096], vec![2u8; 8192]]
            .map(|contents| SealedMemfd::from_bytes("test", &contents).unwrap());
        let manifest = Manifest {
            model: format!("model-{id}"),
            digest: [id as u8; 32],
            generation: id,
            files: Vec::new(),
            devices: vec![ManifestDevice::host()],
            layout: 0,
            one_per_tensor: false,
            allocations: allocations
                .iter()
                .map(|memfd| Allocation { device: 0, bytes: memfd.bytes(), inode: memfd.inode() })
                .collect(),
            tensors: Vec::new(),
            gguf_metadata: bytes::Bytes::new(),
            created_unix_seconds: 0,
        };
        vec![
            inherited(&format!("g{id}.a1"), owned(&allocations[1])),
            inherited(
                &format!("g{id}.manifest"),
                owned(&handoff::manifest::seal_manifest(&manifest).unwrap()),
            ),
            inherited(&format!("g{id}.a0"), owned(&allocations[0])),
        ]
    }

    fn lease(id: u64, generation: u64, pid: i32) -> Vec<InheritedFd> {
        let record = LeaseRecord {
            lease: id,
            generation,
            device: "host".to_owned(),
            kv_bytes: 10,
            workspace_bytes: 20,
            uid: 0,
            pid,
            pid_start_ticks: pidfd::start_ticks(pid).unwrap_or(1),
            token_name: String::new(),
            token_digest: None,
        };
        let mut fds = vec![inherited(&format!("l{id}.record"), owned(&record.to_memfd().unwrap()))];
        fds.extend(pidfd::open(pid).ok().map(|fd| inherited(&format!("l{id}.pidfd"), fd)));
        fds
    }

    fn own_pid() -> i32 {
        std::process::id() as i32
    }

    fn names(adopted: &AdoptedState) -> (Vec<u64>, Vec<u64>, Vec<&str>) {
        (
            adopted.generations.iter().map(|(generation, _)| generation.id).collect(),
            adopted.leases.iter().map(|(record, _)| record.lease).collect(),
            adopted.names_to_remove.iter().map(String::as_str).collect(),
        )
    }

    #[test]
    fn complete_generations_and_leases_of_living_workers_are_adopted() {
        let mut fds = generation(3);
        fds.extend(generation(7));
        fds.extend(lease(5, 7, own_pid()));
        let adopted = adopt(fds);
        assert_eq!(names(&adopted), (vec![3, 7], vec![5], vec![]));
        assert!(adopted.notes.is_empty());
        assert_eq!(adopted.generations[1].0.model, "model-7");
        assert_eq!(adopted.generations[1].0.contents.allocation_bytes, 4096 + 8192);
    }

    #[test]
    fn generation_without_its_commit_record_is_dropped() {
        let mut fds = generation(3);
        fds.remove(1);
        assert_eq!(names(&adopt(fds)), (vec![], vec![], vec!["g3.a0", "g3.a1"]));
    }

    #[test]
    fn wrong_allocations_drop_the_generation_and_its_leases() {
        let missing: fn(&mut Vec<InheritedFd>) = |fds| drop(fds.remove(2));
        let last_missing: fn(&mut Vec<InheritedFd>) = |fds| drop(fds.remove(0));
        let exchanged: fn(&mut Vec<InheritedFd>) = |fds| {
            fds[0].name = "g3.a0".to_owned();
            fds[2].name = "g3.a1".to_owned();
        };
        let foreign: fn(&mut Vec<InheritedFd>) =
            |fds| fds[0].fd = owned(&SealedMemfd::from_bytes("x", &[2; 8192]).unwrap());
        let unsealed: fn(&mut Vec<InheritedFd>) =
            |fds| fds[0].fd = std::fs::File::open("/dev/null").unwrap().into();
        for damage in [missing, last_missing, exchanged, foreign, unsealed] {
            let mut fds = generation(3);
            damage(&mut fds);
            fds.extend(lease(5, 3, own_pid()));
            let expected = fds.len();
            let adopted = adopt(fds);
            assert!(adopted.generations.is_empty() && adopted.leases.is_empty());
            assert_eq!(adopted.names_to_remove.len(), expected, "{:?}", adopted.names_to_remove);
            assert_eq!(adopted.notes.len(), 2);
        }
    }

    #[test]
    fn renamed_generation_is_dropped() {
        let mut fds = generation(3);
        for fd in &mut fds {
            fd.name = fd.name.replace("g3", "g4");
        }
        let adopted = adopt(fds);
        assert!(matches!(adopted.notes[..], [AdoptionNote::WrongGeneration { generation: 4, found: 3 }]));
    }

    #[test]
    fn lease_of_a_dead_worker_has_ended() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let mut fds = generation(3);
        fds.extend(lease(5, 3, child.id() as i32));
        child.kill().unwrap();
        child.wait().unwrap();
        let adopted = adopt(fds);
        assert_eq!(names(&adopted), (vec![3], vec![], vec!["l5.record", "l5.pidfd"]));
    }

    #[test]
    fn lease_with_a_deduplicated_pidfd_is_adopted_while_its_process_lives() {
        let mut fds = generation(3);
        fds.push(lease(5, 3, own_pid()).swap_remove(0));
        assert_eq!(names(&adopt(fds)), (vec![3], vec![5], vec![]));
    }

    #[test]
    fn unrecognized_descriptors_are_closed_and_removed() {
        let null = || std::fs::File::open("/dev/null").unwrap();
        let names_in = ["listener", "g1.a01", "g1.x", "gx.manifest", "l1.pidfd", "l01.record", "a.b.c"];
        let fds = names_in.map(|name| inherited(name, null())).into();
        let adopted = adopt(fds);
        let mut forgotten: Vec<&str> = adopted.names_to_remove.iter().map(String::as_str).collect();
        let mut expected = names_in.to_vec();
        forgotten.sort_unstable();
        expected.sort_unstable();
        assert_eq!(forgotten, expected);
    }
}
