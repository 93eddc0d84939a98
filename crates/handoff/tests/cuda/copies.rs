// SPDX-License-Identifier: Apache-2.0

//! The role that copies a model to every GPU that it sees, over both routes.

use std::time::{Duration, Instant};

use cuda::{Device, DeviceSelector, devices};
use memory::device::{CopyRoute, CopySource, ImportedModel, TensorPlace, WritableModel};
use memory::manifest::TensorEntry;

use crate::roles::{MIB, SAMPLE_BYTES, assert_samples, manifest, write_samples};

const SIZES: [u64; 3] = [2 * MIB, 1024 * MIB, 30 * MIB];

/// The first copy sets the peers up.
const REPETITIONS: usize = 2;

/// A tensor between the two samples of each allocation, so that all bytes are copied.
fn between(entry: &TensorEntry, bytes: u64) -> TensorEntry {
    let offset = SAMPLE_BYTES as u64;
    TensorEntry { name: format!("{}.between", entry.allocation), offset, bytes, ..entry.clone() }
}

pub(crate) fn run(source: &Device) {
    let context = source.context().unwrap();
    let mut model = WritableModel::allocate(&context, &SIZES, Duration::ZERO).unwrap();
    write_samples(&mut model, &context, &SIZES);
    let fds = model.finish().unwrap();
    let mut whole = manifest(source, &SIZES);
    for (allocation, bytes) in SIZES.iter().enumerate() {
        let entry = between(&whole.tensors[2 * allocation], bytes - 2 * SAMPLE_BYTES as u64);
        whole.tensors.push(entry);
    }
    let places: Vec<TensorPlace> = whole
        .tensors
        .iter()
        .map(|tensor| TensorPlace { allocation: tensor.allocation, offset: tensor.offset })
        .collect();
    let gpus = devices(source.driver()).unwrap();
    if gpus.len() < 2 {
        println!("SKIPPED: copies between two GPUs: this process sees one");
    }
    for gpu in gpus {
        // A device of its own, also where it is the source: another process has other handles.
        let target = Device::open(cuda::open_driver().unwrap(), DeviceSelector::Uuid(gpu.uuid)).unwrap();
        let fastest = CopyRoute::between(source, &target).unwrap();
        let routes = match fastest {
            CopyRoute::Peer => [CopyRoute::Peer, CopyRoute::Host].to_vec(),
            CopyRoute::Host => vec![CopyRoute::Host],
        };
        for (route, repetition) in
            routes.into_iter().flat_map(|route| (0..REPETITIONS).map(move |n| (route, n)))
        {
            let context = target.context().unwrap();
            let started = Instant::now();
            let mut copy = WritableModel::allocate(&context, &SIZES, Duration::ZERO).unwrap();
            let allocated = started.elapsed();
            let mapped = CopySource::import(source, &target, route, &whole, &fds).unwrap();
            let imported = started.elapsed();
            mapped.copy_to(&context, &mut copy, &places).unwrap();
            let copied = started.elapsed() - imported;
            drop(mapped);
            let copies = copy.finish().unwrap();
            let found = ImportedModel::import(&target, &manifest(&target, &SIZES), &copies).unwrap();
            assert_samples(&found, &context);
            let bytes: u64 = SIZES.iter().sum();
            println!(
                "measured: copy {repetition} of {} MiB from cuda:{} to cuda:{}, route {route:?}: allocation {:.1} ms, \
                 import {:.1} ms, copy {:.1} ms, {:.0} GB/s",
                bytes / MIB,
                source.info().ordinal,
                gpu.ordinal,
                allocated.as_secs_f64() * 1e3,
                (imported - allocated).as_secs_f64() * 1e3,
                copied.as_secs_f64() * 1e3,
                bytes as f64 / copied.as_secs_f64() / 1e9
            );
        }
    }
}
