// SPDX-License-Identifier: Apache-2.0

//! Tests loading and attaching without faults, and refusals of requests that do not fit.

use handoff::AttachModelError;
use handoff::lease::LeaseStatus;
use memory::pack::GRANULE_BYTES;
use proto::weights::v1::{self as wire, RefusalReason};

use crate::support::{ServerOptions, TEST_TIMEOUT, TestServer, load, load_request, pattern, request};

fn refusal(error: AttachModelError) -> (RefusalReason, String) {
    match error {
        AttachModelError::Refused { reason, text } => (reason, text),
        other => panic!("{other:?}"),
    }
}

#[test]
fn attached_tensors_equal_the_file() {
    let server = TestServer::plain();
    let tensors = [300_000, 1, 0, 1_500_000, 64, 524_288];
    let path = server.make_model("m", &tensors);
    let loaded = server.load("m", &path).unwrap();
    assert!(loaded.read_from_file);
    let generation = loaded.generation.unwrap();
    assert_eq!(generation.tensor_bytes, tensors.iter().sum::<u64>() * 4);

    let attached = server.attach("m").unwrap();
    assert_eq!(attached.manifest.model, "m");
    assert_eq!(attached.manifest.digest[..], generation.digest[..]);
    assert_eq!(attached.tensors.len(), tensors.len());
    for (index, (tensor, values)) in attached.tensors.iter().zip(tensors).enumerate() {
        assert_eq!(tensor.name, format!("tensor.{index}"));
        assert_eq!((tensor.dtype, &tensor.shape[..]), (0, &[values][..]));
        assert!(tensor.bytes.iter().copied().eq(pattern(index, values * 4)), "{}", tensor.name);
    }
    let metadata = gguf::Metadata::parse(attached.manifest.gguf_metadata.clone()).unwrap();
    assert_eq!(metadata.require::<&str>("general.name").unwrap(), "test");
}

#[test]
fn four_hundred_allocations_take_several_batches() {
    let server = TestServer::plain();
    let tensors: Vec<u64> = (0..400).map(|i| 10 + i).collect();
    let path = server.make_model("m", &tensors);
    let generation = server.load_with("m", &path, true).unwrap().generation.unwrap();
    assert_eq!(generation.allocations, 400);
    assert_eq!(generation.allocation_bytes, 400 * GRANULE_BYTES);

    let attached = server.attach("m").unwrap();
    for (index, tensor) in attached.tensors.iter().enumerate() {
        assert!(tensor.bytes.iter().copied().eq(pattern(index, tensors[index] * 4)));
    }
    println!("401 descriptors in {:?}", attached.handoff);
}

#[test]
fn weights_are_mapped_and_not_copied() {
    let (server, _) = TestServer::with_model(ServerOptions::default(), "m");
    let attached = server.attach("m").unwrap();
    // Reads every byte.
    let sum: u64 = attached.tensors.iter().flat_map(|t| t.bytes.iter()).map(|&b| u64::from(b)).sum();
    assert!(sum > 0);
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let address = format!("{:x}-", attached.tensors[0].bytes.as_ptr() as usize);
    let mapping: Vec<&str> = smaps.lines().skip_while(|line| !line.starts_with(&address)).take(25).collect();
    assert!(mapping[0].contains("memfd:ballast-weights"), "{}", mapping[0]);
    for field in ["Anonymous:", "Swap:"] {
        let line = mapping.iter().find(|line| line.starts_with(field)).unwrap();
        assert!(line.ends_with(" 0 kB"), "{line}");
    }
}

#[test]
fn second_load_of_a_file_joins_the_first() {
    let server = TestServer::plain();
    let path = server.make_model("m", &[2_000_000]);
    let admin = server.admin();
    let loaded = server.runtime.block_on(async {
        let loads = (0..4).map(|_| load(admin.clone(), load_request("m", &path, false)));
        futures::future::join_all(loads).await
    });
    let generations: Vec<u64> =
        loaded.into_iter().map(|loaded| loaded.unwrap().generation.unwrap().generation).collect();
    assert_eq!(generations, [1; 4]);
    let again = server.load("m", &path).unwrap();
    assert!(!again.read_from_file);
    assert_eq!(server.status().generations.len(), 1);
}

#[test]
fn several_models_are_resident_and_unloaded_independently() {
    let server = TestServer::plain();
    let baseline_fds = server.server_fds();
    let (a, b) = (server.make_model("a", &[1000]), server.make_model("b", &[2000, 3000]));
    server.load("a", &a).unwrap();
    server.load("b", &b).unwrap();
    let worker = server.attach("b").unwrap();
    assert_eq!(server.unload("a").unwrap(), 0);
    assert_eq!(server.unload("b").unwrap(), 1);
    let status = server.status();
    assert_eq!(status.generations.len(), 1, "b waits for its worker");
    assert_eq!(status.generations[0].state(), wire::GenerationState::Retiring);
    assert_eq!(refusal(server.attach("b").unwrap_err()).0, RefusalReason::UnknownModel);

    let handoff::attach::AttachedModel { tensors, lease, .. } = worker;
    assert!(tensors[1].bytes.iter().copied().eq(pattern(1, 12_000)));
    drop(tensors);
    drop(lease);
    let status = server.wait_status("the end of b", |status| status.generations.is_empty());
    let ledger = status.ledger.unwrap();
    assert_eq!((ledger.reserved_bytes, ledger.reserved_fds, ledger.reservations.len()), (0, 0, 0));
    server.fd_store.wait_names(&[]);
    // One descriptor is the admin connection of the last status call.
    server.wait_status("its descriptors", |_| server.server_fds() <= baseline_fds + 2);
}

#[test]
fn changed_file_replaces_the_model_for_new_workers() {
    let (server, path) = TestServer::with_model(ServerOptions::default(), "m");
    let old = server.attach("m").unwrap();
    std::fs::remove_file(&path).unwrap();
    server.make_model("m", &[77]);
    let generation = server.load("m", &path).unwrap().generation.unwrap();
    assert_eq!(generation.generation, 2);
    let new = server.attach("m").unwrap();
    assert_eq!((old.lease.generation(), new.lease.generation()), (1, 2));
    assert_eq!((old.tensors.len(), new.tensors.len()), (3, 1));
    drop(old);
    // Fields drop in order: the tensors before the lease.
    server.wait_status("the end of generation 1", |status| status.generations.len() == 1);
}

#[test]
fn early_worker_waits_for_the_load() {
    let server =
        TestServer::start(ServerOptions { loader_stop_at: Some(32 << 20), ..ServerOptions::default() });
    let path = server.path("m.gguf");
    crate::support::make_sparse_model(&path, 128 << 20);
    let admin = server.admin();
    let loading = server.runtime.spawn(load(admin, load_request("m", &path, false)));
    let loader = server.wait_stopped_loader();
    let socket = server.socket();
    let (report, reports) = std::sync::mpsc::channel();
    let early = std::thread::spawn(move || {
        handoff::attach::attach(&socket, &request("m"), |progress| report.send(progress).unwrap_or_default())
    });
    // The loader stops itself half way and continues when the worker waits.
    let first = reports.recv_timeout(TEST_TIMEOUT).unwrap();
    crate::support::signal(loader, nix::sys::signal::Signal::SIGCONT);
    assert_eq!(early.join().unwrap().unwrap().tensors[0].bytes.len(), 128 << 20);
    assert_eq!((first.total_bytes, first.jobs_ahead), (128 << 20, 0));
    server.runtime.block_on(loading).unwrap().unwrap();
}

#[test]
fn refusals_name_the_reason() {
    let (server, _) = TestServer::with_model(
        ServerOptions { config: "host-budget = \"64MiB\"".to_owned(), ..ServerOptions::default() },
        "m",
    );
    let ask = |change: fn(&mut handoff::attach::AttachRequest)| {
        let mut ask = request("m");
        change(&mut ask);
        refusal(handoff::attach::attach(&server.socket(), &ask, |_| {}).unwrap_err())
    };
    let (reason, text) = ask(|ask| ask.model = "other".to_owned());
    assert_eq!(reason, RefusalReason::UnknownModel);
    assert!(text.contains("\"other\"") && text.contains("loaded are: m"), "{text}");
    let (reason, text) = ask(|ask| ask.layout = 7);
    assert_eq!(reason, RefusalReason::Layout);
    assert!(text.contains("layout 7 was asked for") && text.contains("has layout 0"), "{text}");
    assert_eq!(ask(|ask| ask.device = "GPU-0".to_owned()).0, RefusalReason::Device);
    let (reason, text) = ask(|ask| ask.kv_bytes = 1 << 30);
    assert_eq!(reason, RefusalReason::Ledger);
    assert!(text.contains("1.00 GiB are needed") && text.contains("of 64.0 MiB are free"), "{text}");
    assert_eq!(server.status().leases.len(), 0);
}

#[test]
fn tokens_are_required_after_the_first_registration() {
    let (server, _) = TestServer::with_model(ServerOptions::default(), "m");
    drop(server.attach("m").unwrap());
    server.allow_token("worker-0", "0123456789abcdef0");
    assert_eq!(refusal(server.attach("m").unwrap_err()).0, RefusalReason::Token);
    assert!(server.worker("m", "wrong token, long enough").greeting.starts_with("refused"));
    let worker = server.worker("m", "0123456789abcdef0");
    let (lease, _) = worker.attached();
    let status = server.status();
    let held = status.leases.iter().find(|held| held.lease == lease).unwrap();
    assert_eq!((held.token_name.as_str(), held.pid), ("worker-0", worker.pid()));
    // The worker restarts with a new token.
    server.allow_token("worker-0", "fedcba98765432100");
    assert!(server.worker("m", "0123456789abcdef0").greeting.starts_with("refused"));
    server.worker("m", "fedcba98765432100").attached();
}

#[test]
fn other_users_are_refused() {
    let options = ServerOptions { config: "allow-users = [4242]".to_owned(), ..ServerOptions::default() };
    let (server, _) = TestServer::with_model(options, "m");
    assert_eq!(refusal(server.attach("m").unwrap_err()).0, RefusalReason::PeerUid);
}

#[test]
fn configured_models_are_loaded_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.gguf");
    crate::support::make_model(&path, &[1000]);
    let config = format!("[[models]]\nname = \"m\"\npath = {path:?}\npack = false");
    let server = TestServer::start(ServerOptions { config, ..ServerOptions::default() });
    // The load may not have begun yet.
    let attached = loop {
        match server.attach("m") {
            Err(AttachModelError::Refused { reason: RefusalReason::UnknownModel, .. }) => {}
            result => break result.unwrap(),
        }
    };
    assert_eq!(attached.lease.status(), LeaseStatus::Held);
}

#[test]
fn configured_models_are_all_requested_while_the_first_one_loads() {
    let directory = tempfile::tempdir().unwrap();
    let models = ["a", "b"].map(|name| {
        let path = directory.path().join(format!("{name}.gguf"));
        crate::support::make_sparse_model(&path, 8 << 20);
        format!("[[models]]\nname = \"{name}\"\npath = {path:?}\n")
    });
    let server = TestServer::start(ServerOptions {
        config: models.concat(),
        loader_stop_at: Some(2 << 20),
        ..ServerOptions::default()
    });
    server.wait_stopped_loader();
    server.wait_status("the second load waits", |status| status.generations.len() == 2);
}

#[test]
fn attached_tensors_of_real_models_equal_their_files() {
    let Some(data) = std::env::var_os("BALLAST_TEST_DATA") else {
        println!("SKIPPED: BALLAST_TEST_DATA is not set, no real model to load");
        return;
    };
    let server = TestServer::plain();
    let models = std::path::Path::new(&data).join("models");
    for name in ["pycoder-7m-q8_0", "pycoder-22m-q4_k_m"] {
        let path = models.join(format!("{name}.gguf"));
        server.load(name, &path).unwrap();
        let attached = server.attach(name).unwrap();
        let file = std::fs::read(&path).unwrap();
        let header = gguf::Header::read(&file[..], file.len() as u64).unwrap();
        assert_eq!(attached.tensors.len(), header.tensors().len());
        for (tensor, info) in attached.tensors.iter().zip(header.tensors()) {
            assert_eq!((&tensor.name, tensor.dtype), (&info.name, info.dtype.id()));
            let from = header.file_offset(info) as usize;
            assert!(tensor.bytes == file[from..from + info.bytes as usize], "{name}: {}", info.name);
        }
        println!("{name}: handed over in {:?}", attached.handoff);
    }
}

#[test]
fn split_model_is_loaded_from_all_files() {
    let server = TestServer::plain();
    let part = |number: u16, tensors: &[(&str, u64)]| {
        let mut metadata = gguf::MetadataBuilder::default();
        metadata.put("split.no", number - 1).unwrap();
        metadata.put("split.count", 2u16).unwrap();
        metadata.put("split.tensors.count", 3i32).unwrap();
        metadata.put("tokenizer.ggml.model", "none").unwrap();
        let mut layout = gguf::TensorLayout::default();
        for (name, values) in tensors {
            layout.add(name, quant::DType::F32, &[*values]).unwrap();
        }
        let path = server.path(&format!("m-{number:05}-of-00002.gguf"));
        let mut writer =
            gguf::GgufWriter::start(std::fs::File::create(&path).unwrap(), &metadata, layout).unwrap();
        for (_, values) in tensors {
            writer.write(&pattern(number.into(), values * 4).collect::<Vec<u8>>()).unwrap();
        }
        writer.finish().unwrap();
        path
    };
    let first = part(1, &[("a", 1000)]);
    let second = part(2, &[("b", 5000), ("c", 70)]);
    server.load("m", &first).unwrap();
    let attached = server.attach("m").unwrap();
    assert_eq!(attached.manifest.files.len(), 2);
    for (tensor, (name, number, values)) in
        attached.tensors.iter().zip([("a", 1, 1000), ("b", 2, 5000), ("c", 2, 70)])
    {
        assert_eq!(tensor.name, name);
        assert!(tensor.bytes.iter().copied().eq(pattern(number, values * 4)));
    }
    let text = server.load("second", &second).unwrap_err().message().to_owned();
    assert!(text.contains("open the first"), "{text}");
    std::fs::remove_file(&second).unwrap();
    assert!(!server.load("m", &first).unwrap().read_from_file, "what is resident needs no file");
    let text = server.load("other", &first).unwrap_err().message().to_owned();
    assert!(text.contains("m-00002-of-00002.gguf"), "{text}");
}

#[test]
fn watch_events_reports_changes() {
    let server = TestServer::plain();
    let mut admin = server.admin();
    let mut events =
        server.runtime.block_on(admin.watch_events(wire::WatchEventsRequest {})).unwrap().into_inner();
    let path = server.make_model("m", &[10]);
    server.load("m", &path).unwrap();
    drop(server.attach("m").unwrap());
    server.unload("m").unwrap();
    let seen = server.runtime.block_on(async {
        let mut seen = Vec::new();
        loop {
            let event = tokio::time::timeout(TEST_TIMEOUT, events.message()).await.unwrap().unwrap().unwrap();
            match event.kind.unwrap() {
                wire::event::Kind::Generation(g) => seen.push(format!("{:?}", g.state())),
                wire::event::Kind::Lease(lease) => seen.push(format!("{:?}", lease.state())),
                wire::event::Kind::LeaseEnded(_) => seen.push("LeaseEnded".to_owned()),
                wire::event::Kind::GenerationRemoved(_) => return seen,
                wire::event::Kind::MissedEvents(_) => panic!("nothing was missed"),
            }
        }
    });
    let expected = ["Loading", "Ready", "Granting", "Held", "LeaseEnded"];
    assert!(expected.iter().all(|state| seen.iter().any(|found| found == state)), "{seen:?}");
}
