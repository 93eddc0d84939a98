// SPDX-License-Identifier: Apache-2.0

//! Reads tensor data from files into memfds. Several threads read; each byte is read once, and is
//! hashed while it is in the CPU cache.
//!
//! The work is split beforehand into ranges: disjoint slices of the destination, in file order. A
//! reader takes the next range until none is left or a reader fails.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use memory::host::{HostAllocation, HostBacking, WINDOW_BYTES};
use memory::memfd::MemfdError;
use memory::pack::PackPlan;

use super::checksum::{CHUNK_BYTES, chunk_checksum};

/// If a tensor starts on a granule, no range crosses a window of memory, so readers rarely wait for
/// each other.
const RANGE_BYTES: usize = WINDOW_BYTES as usize;

const _: () = assert!(RANGE_BYTES.is_multiple_of(CHUNK_BYTES));

#[derive(Debug, thiserror::Error)]
pub(super) enum TensorReadError {
    #[error("tensor {tensor} cannot be read from {}", path.display())]
    Io { tensor: String, path: PathBuf, source: io::Error },
    #[error("tensor {tensor} is truncated: {} ends at byte {end}, {needed} bytes are needed", path.display())]
    Truncated { tensor: String, path: PathBuf, end: u64, needed: u64 },
    #[error("no memory for tensor {tensor}: the model needs {needed} bytes, {done} of them were allocated")]
    Memory { tensor: String, needed: u64, done: u64, source: MemfdError },
    #[error("the load was cancelled")]
    Cancelled,
}

/// A tensor, and its position in the files.
#[derive(Debug)]
pub(crate) struct TensorSource {
    pub(crate) name: String,
    /// Index into the open files.
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

pub(crate) struct OpenModelFile {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
}

/// Shared between the readers and the thread that reports progress.
#[derive(Debug, Default)]
pub(crate) struct ReadProgress {
    pub(crate) done_bytes: AtomicU64,
    pub(crate) cancelled: AtomicBool,
}

/// A part of one tensor, with its destination and the slots of its chunk checksums.
struct ReadRange<'a> {
    source: &'a TensorSource,
    /// Offset of the range from the tensor's first byte.
    start: u64,
    memory: &'a mut [u8],
    chunks: &'a mut [u128],
    backing: &'a HostBacking<'a>,
    /// Offset of `memory` in its allocation.
    at: u64,
}

/// Fills the allocations of `plan`. Returns the chunk checksums of each tensor.
pub(crate) fn read_all(
    sources: &[TensorSource],
    files: &[OpenModelFile],
    plan: &PackPlan,
    allocations: &mut [HostAllocation],
    threads: usize,
    progress: &ReadProgress,
) -> Result<Vec<Vec<u128>>, TensorReadError> {
    let mut chunks: Vec<Vec<u128>> =
        sources.iter().map(|source| vec![0; (source.bytes as usize).div_ceil(CHUNK_BYTES)]).collect();
    let (memories, backings): (Vec<&mut [u8]>, Vec<HostBacking<'_>>) =
        allocations.iter_mut().map(HostAllocation::parts).unzip();
    let ranges = Mutex::new(split_into_ranges(sources, plan, memories, &backings, &mut chunks).into_iter());
    let failure = Mutex::new(None);

    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    if progress.cancelled.load(Ordering::Relaxed) {
                        return;
                    }
                    // A poisoned lock means that another reader panicked; the scope propagates
                    // that.
                    let Some(range) = ranges.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                        return;
                    };
                    if let Err(error) = read_range(range, files, plan, progress) {
                        // The first failure is the cause; later ones follow from it.
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        progress.cancelled.store(true, Ordering::Relaxed);
                        return;
                    }
                }
            });
        }
    });
    drop(ranges);
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None if progress.cancelled.load(Ordering::Relaxed) => Err(TensorReadError::Cancelled),
        None => Ok(chunks),
    }
}

/// Splits all tensors into ranges. Every range owns its slice of memory.
fn split_into_ranges<'a>(
    sources: &'a [TensorSource],
    plan: &PackPlan,
    memories: Vec<&'a mut [u8]>,
    backings: &'a [HostBacking<'a>],
    chunks: &'a mut [Vec<u128>],
) -> Vec<ReadRange<'a>> {
    // In memory order, so that slices can be split off one after the other.
    let mut order: Vec<_> = sources.iter().zip(&plan.placements).zip(chunks).collect();
    order.sort_by_key(|((_, placement), _)| (placement.allocation, placement.offset));
    let mut rest: Vec<(u64, &mut [u8])> = memories.into_iter().map(|memory| (0, memory)).collect();
    let mut ranges = Vec::new();
    for ((source, placement), chunks) in order {
        let (position, memory) = &mut rest[placement.allocation];
        let gap = (placement.offset - *position) as usize;
        let (_, after_gap) = std::mem::take(memory).split_at_mut(gap);
        let (tensor, after) = after_gap.split_at_mut(source.bytes as usize);
        *memory = after;
        *position = placement.offset + source.bytes;
        let chunks = tensor.chunks_mut(RANGE_BYTES).zip(chunks.chunks_mut(RANGE_BYTES / CHUNK_BYTES));
        for (index, (memory, chunks)) in chunks.enumerate() {
            let start = (index * RANGE_BYTES) as u64;
            let at = placement.offset + start;
            ranges.push(ReadRange {
                source,
                start,
                memory,
                chunks,
                backing: &backings[placement.allocation],
                at,
            });
        }
    }
    ranges.sort_by_key(|range| (range.source.file, range.source.offset + range.start));
    ranges
}

fn read_range(
    run: ReadRange<'_>,
    files: &[OpenModelFile],
    plan: &PackPlan,
    progress: &ReadProgress,
) -> Result<(), TensorReadError> {
    let ReadRange { source, start, memory, chunks, backing, at } = run;
    backing.ensure(at, memory.len() as u64).map_err(|cause| TensorReadError::Memory {
        tensor: source.name.clone(),
        needed: plan.allocation_bytes(),
        done: progress.done_bytes.load(Ordering::Relaxed),
        source: cause,
    })?;
    let open = &files[source.file];
    let mut offset = source.offset + start;
    for (memory, slot) in memory.chunks_mut(CHUNK_BYTES).zip(chunks) {
        read_exact(open, source, memory, offset)?;
        *slot = chunk_checksum(memory);
        offset += memory.len() as u64;
        progress.done_bytes.fetch_add(memory.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}

pub(super) fn read_exact(
    open: &OpenModelFile,
    source: &TensorSource,
    mut memory: &mut [u8],
    mut offset: u64,
) -> Result<(), TensorReadError> {
    while !memory.is_empty() {
        match open.file.read_at(memory, offset) {
            Ok(0) => {
                return Err(TensorReadError::Truncated {
                    tensor: source.name.clone(),
                    path: open.path.clone(),
                    end: offset,
                    needed: source.offset + source.bytes,
                });
            }
            Ok(bytes) => {
                memory = &mut memory[bytes..];
                offset += bytes as u64;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => {
                return Err(TensorReadError::Io {
                    tensor: source.name.clone(),
                    path: open.path.clone(),
                    source: cause,
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use memory::pack::Packing;
    use proptest::prelude::*;

    use super::*;
    use crate::loader::checksum;

    fn model(sizes: &[u64]) -> (Vec<u8>, Vec<TensorSource>) {
        let mut file = vec![0xEE; 100];
        let mut sources = Vec::new();
        for (index, &bytes) in sizes.iter().enumerate() {
            sources.push(TensorSource {
                name: format!("t{index}"),
                file: 0,
                offset: file.len() as u64,
                bytes,
            });
            file.extend((0..bytes).map(|i| (i.wrapping_mul(31) >> 3) as u8 ^ index as u8));
            file.extend([0xEE; 7]);
        }
        (file, sources)
    }

    fn open(contents: &[u8]) -> [OpenModelFile; 1] {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(contents).unwrap();
        [OpenModelFile { path: "model.gguf".into(), file }]
    }

    fn allocate(plan: &PackPlan) -> Vec<HostAllocation> {
        plan.allocations.iter().map(|&bytes| HostAllocation::create("test", bytes).unwrap()).collect()
    }

    fn sizes(sources: &[TensorSource]) -> Vec<u64> {
        sources.iter().map(|source| source.bytes).collect()
    }

    fn check(tensors: &[u64], packing: Packing, threads: usize) {
        let (contents, sources) = model(tensors);
        let files = open(&contents);
        let plan = PackPlan::new(&sizes(&sources), packing).unwrap();
        let mut allocations = allocate(&plan);
        let progress = ReadProgress::default();
        let chunks = read_all(&sources, &files, &plan, &mut allocations, threads, &progress).unwrap();
        assert_eq!(progress.done_bytes.into_inner(), plan.tensor_bytes);
        let sealed: Vec<_> = allocations.into_iter().map(|allocation| allocation.seal().unwrap()).collect();
        let mapped: Vec<_> = sealed.iter().map(|memfd| memfd.map("test", u64::MAX).unwrap()).collect();
        for ((source, placement), chunks) in sources.iter().zip(&plan.placements).zip(&chunks) {
            let expected = &contents[source.offset as usize..][..source.bytes as usize];
            let found = &mapped[placement.allocation][placement.offset as usize..][..source.bytes as usize];
            assert!(found == expected, "{}", source.name);
            let one_by_one: Vec<u128> = expected.chunks(CHUNK_BYTES).map(checksum::chunk_checksum).collect();
            assert_eq!(chunks, &one_by_one);
        }
    }

    #[test]
    fn long_tensor_is_split_into_ranges_and_read_completely() {
        check(&[3 * RANGE_BYTES as u64 + 12_345, 5, 2 << 20], Packing::Slabs, 3);
        check(&[(1 << 20) + 1, 0, 77], Packing::OnePerTensor, 2);
    }

    #[test]
    fn truncated_file_names_the_tensor() {
        let (contents, sources) = model(&[1000, 2000, 3000]);
        let files = open(&contents[..3500]);
        let plan = PackPlan::new(&sizes(&sources), Packing::Slabs).unwrap();
        let error =
            read_all(&sources, &files, &plan, &mut allocate(&plan), 2, &ReadProgress::default()).unwrap_err();
        assert!(
            matches!(&error, TensorReadError::Truncated { tensor, end: 3500, .. } if tensor == "t2"),
            "{error}"
        );
    }

    #[test]
    fn cancelled_load_stops() {
        let (contents, sources) = model(&[1000]);
        let files = open(&contents);
        let plan = PackPlan::new(&[1000], Packing::Slabs).unwrap();
        let progress = ReadProgress { cancelled: true.into(), ..ReadProgress::default() };
        let result = read_all(&sources, &files, &plan, &mut allocate(&plan), 2, &progress);
        assert!(matches!(result, Err(TensorReadError::Cancelled)));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn any_mix_of_tensors_is_read_completely(
            tensors in prop::collection::vec(prop_oneof![0..3000u64, 0..5_000_000u64], 1..20),
            one_each in any::<bool>(),
            threads in 1usize..4,
        ) {
            check(&tensors, if one_each { Packing::OnePerTensor } else { Packing::Slabs }, threads);
        }
    }
}
