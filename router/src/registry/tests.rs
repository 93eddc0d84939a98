// SPDX-License-Identifier: Apache-2.0

use gguf::MetadataBuilder;
use tonic::transport::Endpoint;

use super::*;
use crate::routing::WorkerFingerprint;
use crate::worker_outlook::{FleetAnswer, NextWorker};

/// A model without tokenizer. Its key is `name` and `fingerprint`, its content is `digest`.
fn model(name: &str, fingerprint: u8, digest: u8, generation: u64) -> Arc<ServedModel> {
    let mut metadata = MetadataBuilder::default();
    metadata.put("tokenizer.ggml.model", "none").unwrap();
    let key = ModelKey { name: name.into(), fingerprint: WorkerFingerprint(vec![fingerprint]) };
    let description = ServedModelInfo {
        key,
        aliases: Vec::new(),
        chat_template: None,
        sampling_defaults: proto::v1::Sampling::default(),
        digest: vec![digest],
        generation,
        context_tokens: 64,
        vocabulary: 16,
        weight_bytes: 1,
        pooling: proto::v1::Pooling::Last,
        embedding_length: 8,
    };
    Arc::new(ServedModel::load(description, metadata.bytes().to_vec(), None).unwrap())
}

fn register(registry: &WorkerRegistry, model: &Arc<ServedModel>) -> WorkerId {
    register_on(registry, model, "host")
}

fn register_on(registry: &WorkerRegistry, model: &Arc<ServedModel>, device: &str) -> WorkerId {
    let client = WorkerClient::new(Endpoint::from_static("http://localhost").connect_lazy());
    let capacity = WorkerCapacity { running_max: 4, ..WorkerCapacity::default() };
    registry.register(format!("worker of {}", model.name()), model.clone(), client, device.into(), capacity)
}

fn registry() -> Arc<WorkerRegistry> {
    WorkerRegistry::new(RoutingMode::LeastLoaded)
}

fn generation(registry: &WorkerRegistry, name: Option<&str>) -> u64 {
    registry.resolve(name, &ModelAccess::default()).unwrap().description.generation
}

#[tokio::test]
async fn a_name_means_the_newest_model_that_has_workers() {
    let registry = registry();
    let (old, new) = (model("m", 1, 1, 7), model("m", 2, 2, 8));
    let new_worker = register(&registry, &new);
    register(&registry, &old);
    assert_eq!(generation(&registry, Some("m")), 8);
    registry.remove(new_worker);
    assert_eq!(generation(&registry, Some("m")), 7, "the newer model has no worker any more");
    register(&registry, &new);
    assert_eq!(generation(&registry, None), 8);
}

#[tokio::test]
async fn devices_that_compute_differently_get_the_requests_of_one_name_in_turn() {
    let registry = registry();
    register_on(&registry, &model("m", 1, 1, 7), "host");
    register_on(&registry, &model("m", 2, 1, 8), "GPU-1");
    register_on(&registry, &model("m", 2, 1, 8), "GPU-1");
    let resolve = || registry.resolve(Some("m"), &ModelAccess::default()).unwrap();
    let held: Vec<Arc<ServedModel>> = (0..6).map(|_| resolve()).collect();
    let generations: Vec<u64> = held.iter().map(|model| model.description.generation).collect();
    assert_eq!(generations, [8, 7, 8, 8, 7, 8], "two workers take twice as many as one");
    let current = registry.snapshot().iter().all(|snapshot| snapshot.is_current);
    assert!(current, "new requests go to both");
    drop(held);
    // New settings of a rolling restart on the same device come first.
    register_on(&registry, &model("m", 3, 1, 9), "GPU-1");
    let held: Vec<Arc<ServedModel>> = (0..3).map(|_| resolve()).collect();
    assert!(held.iter().all(|model| model.description.generation != 8));
}

#[tokio::test]
async fn copies_with_one_fingerprint_are_one_model_and_keep_their_devices() {
    let registry = registry();
    let (first, second) = (model("m", 1, 1, 7), model("m", 1, 1, 8));
    register_on(&registry, &first, "host:0");
    drop(first);
    let request = registry.resolve(None, &ModelAccess::default()).unwrap();
    register_on(&registry, &second, "host:1");
    let snapshot = registry.snapshot();
    assert_eq!((snapshot.len(), snapshot[0].requests), (1, 1), "the request counts for both copies");
    let worker = |worker: &WorkerSnapshot| (worker.device.to_string(), worker.generation);
    let workers: Vec<_> = snapshot[0].workers.iter().map(worker).collect();
    assert_eq!(workers, [("host:0".to_owned(), 7), ("host:1".to_owned(), 8)]);
    drop(request);
}

#[tokio::test]
async fn a_missing_name_is_resolved_only_if_all_models_have_one_name() {
    let registry = registry();
    assert_eq!(registry.resolve(None, &ModelAccess::default()).unwrap_err(), ResolveError::NoModel);
    register(&registry, &model("a", 1, 1, 1));
    register(&registry, &model("a", 2, 2, 2));
    assert_eq!(generation(&registry, None), 2);
    register(&registry, &model("b", 3, 3, 3));
    let known = vec!["a".to_owned(), "b".to_owned()];
    assert_eq!(
        registry.resolve(None, &ModelAccess::default()).unwrap_err(),
        ResolveError::Ambiguous { known: known.clone() }
    );
    assert_eq!(
        registry.resolve(Some("c"), &ModelAccess::default()).unwrap_err(),
        ResolveError::Unknown { name: "c".to_owned(), known }
    );
}

#[tokio::test]
async fn models_that_the_caller_may_not_use_do_not_exist_for_it() {
    let registry = registry();
    register(&registry, &model("a", 1, 1, 1));
    register(&registry, &model("b", 2, 2, 2));
    let only = |name: &str| ModelAccess::only(vec![name.to_owned()]);
    assert_eq!(registry.resolve(None, &only("a")).unwrap().name(), "a");
    let error = registry.resolve(Some("b"), &only("a")).unwrap_err();
    assert_eq!(error.to_string(), "the model `b` does not exist; served models: a");
    let error = registry.resolve(Some("a"), &only("c")).unwrap_err();
    assert_eq!(error.to_string(), "the model `a` does not exist; served models: none");
    let names: Vec<String> =
        registry.snapshot_for(&only("b")).iter().map(|snapshot| snapshot.model.name().to_owned()).collect();
    assert_eq!(names, ["b"]);
}

#[tokio::test]
async fn a_name_that_no_worker_has_told_may_be_that_of_a_worker_that_starts() {
    let registry = registry();
    let resolve = |name: &str| registry.resolve(Some(name), &ModelAccess::default()).unwrap_err();
    let [first, second] = [1, 2].map(|inode| (format!("worker-{inode}.sock").into(), inode));
    register(&registry, &model("a", 1, 1, 1));
    registry.accept(&first);
    registry.note_sockets(&[first.clone(), second.clone()].into());
    assert_eq!(resolve("b"), ResolveError::NotAllKnown);
    registry.refuse(second.clone(), "no tokenizer");
    assert!(matches!(resolve("b"), ResolveError::Unknown { .. }), "a refused worker serves no model");
    registry.note_sockets(&[first.clone(), second].into());
    assert!(matches!(resolve("b"), ResolveError::Unknown { .. }));
    // The first worker restarts: it binds its path again, and had told its model.
    registry.note_sockets(&[(first.0, 3)].into());
    assert!(matches!(resolve("b"), ResolveError::Unknown { .. }));
}

#[tokio::test]
async fn a_request_without_a_model_waits_for_workers_that_are_older_than_the_router() {
    let registry = registry();
    let resolve = || registry.resolve(None, &ModelAccess::default()).map(|model| model.name().to_owned());
    let [first, second, added] = [1, 2, 3].map(|inode| (format!("worker-{inode}.sock").into(), inode));
    registry.note_sockets(&[first.clone(), second.clone()].into());
    register(&registry, &model("a", 1, 1, 1));
    registry.accept(&first);
    assert_eq!(resolve(), Err(ResolveError::NotAllKnown));
    registry.accept(&second);
    assert_eq!(resolve().as_deref(), Ok("a"));
    // A worker that is added later delays no request.
    registry.note_sockets(&[first, second, added].into());
    assert_eq!(resolve().as_deref(), Ok("a"));
}

#[tokio::test]
async fn equal_content_is_shared_and_the_same_key_is_preferred() {
    let registry = registry();
    let (first, renamed) = (model("first", 1, 9, 1), model("renamed", 2, 9, 1));
    register(&registry, &renamed);
    register(&registry, &first);
    register(&registry, &model("other", 3, 8, 2));
    for wanted in [&first, &renamed] {
        assert_eq!(registry.model_with_content(&wanted.description).unwrap().key(), wanted.key());
    }
    assert!(registry.model_with_content(&model("first", 1, 7, 1).description).is_none());
}

#[tokio::test]
async fn the_eight_newest_models_without_workers_stay_known() {
    let registry = registry();
    let keys = |registry: &WorkerRegistry| -> Vec<String> {
        registry.model_keys().iter().map(|key| key.name.to_string()).collect()
    };
    register(&registry, &model("served", 0, 0, 0));
    for n in 1..=10 {
        let worker = register(&registry, &model(&format!("m{n}"), n, n, n.into()));
        registry.remove(worker);
    }
    // Idle models are removed when the next worker registers.
    register(&registry, &model("last", 11, 11, 11));
    let kept = ["served", "m3", "m4", "m5", "m6", "m7", "m8", "m9", "m10", "last"];
    assert_eq!(keys(&registry), kept);
    assert!(
        registry.resolve(Some("m2"), &ModelAccess::default()).is_err()
            && registry.resolve(Some("m3"), &ModelAccess::default()).is_ok()
    );
}

#[tokio::test]
async fn a_model_that_registers_again_is_known_once() {
    let registry = registry();
    let served = model("m", 1, 1, 1);
    let workers = [register(&registry, &served), register(&registry, &served)];
    assert_ne!(workers[0], workers[1]);
    assert_eq!(registry.model_keys().len(), 1);
    let snapshot = registry.snapshot();
    assert_eq!((snapshot.len(), snapshot[0].workers.len()), (1, 2));
}

#[tokio::test]
async fn reports_are_in_the_snapshot_and_steer_streams() {
    let registry = registry();
    let served = model("m", 1, 1, 1);
    let (first, second) = (register(&registry, &served), register(&registry, &served));
    let busy = WorkerReport { running: 4, steps: 9, ..WorkerReport::default() };
    registry.update_report(first, busy);
    let reports: Vec<u32> =
        registry.snapshot()[0].workers.iter().map(|worker| worker.report.running).collect();
    assert_eq!(reports, [4, 0]);
    for _ in 0..3 {
        assert_eq!(registry.choose_worker(served.key(), &[]).unwrap().id, second);
    }
}

#[tokio::test]
async fn subscribers_see_each_change_of_the_workers() {
    let registry = registry();
    let mut changes = registry.subscribe();
    let worker = register(&registry, &model("m", 1, 1, 1));
    assert!(changes.has_changed().unwrap());
    changes.mark_unchanged();
    registry.remove(worker);
    assert!(changes.has_changed().unwrap() && !registry.has_workers());
}

#[tokio::test]
async fn a_swapped_name_means_what_the_supervisor_wants_and_requests_of_each_file_are_counted() {
    let registry = registry();
    let (old, new) = (model("m", 1, 1, 7), model("m", 2, 2, 8));
    register(&registry, &old);
    register(&registry, &model("m", 1, 1, 7));
    drop(old);
    registry.set_fleet_models(HashMap::from([("m".to_owned(), vec![1])]));
    register(&registry, &new);
    drop(new);
    let request = registry.resolve(Some("m"), &ModelAccess::default()).unwrap();
    assert_eq!(request.description.generation, 7, "the new file has not been committed");
    let held = || -> Vec<(u64, usize, bool)> {
        let entry = |s: ModelSnapshot| (s.model.description.generation, s.requests, s.is_current);
        registry.snapshot().into_iter().map(entry).collect()
    };
    assert_eq!(held(), [(7, 1, true), (8, 0, false)]);
    registry.set_fleet_models(HashMap::from([("m".to_owned(), vec![2])]));
    assert_eq!(held(), [(7, 1, false), (8, 0, true)]);
    drop(request);
    assert_eq!(held(), [(7, 0, false), (8, 0, true)]);
    assert_eq!(generation(&registry, None), 8);
}

#[tokio::test]
async fn models_that_have_left_the_fleet_are_forgotten_and_those_whose_workers_restart_are_not() {
    let registry = registry();
    let models = [model("restarts", 1, 1, 1), model("unloaded", 2, 2, 2), model("m", 3, 3, 3)];
    let workers = models.each_ref().map(|model| register(&registry, model));
    register(&registry, &model("m", 4, 4, 4));
    drop(models);
    workers.into_iter().for_each(|worker| registry.remove(worker));
    let listed = || -> Vec<(String, u64)> {
        let entry = |s: ModelSnapshot| (s.model.name().to_owned(), s.model.description.generation);
        registry.snapshot().into_iter().map(entry).collect()
    };
    assert_eq!(listed().len(), 4);
    let in_flight = registry.resolve(Some("unloaded"), &ModelAccess::default()).unwrap();
    let fleet = [("restarts", vec![]), ("m", vec![4])].map(|(name, digest)| (name.to_owned(), digest));
    let fleet = HashMap::from(fleet);
    registry.set_fleet_models(fleet.clone());
    assert_eq!(listed().len(), 3, "a request holds the unloaded model");
    drop(in_flight);
    registry.set_fleet_models(fleet);
    assert_eq!(listed(), [("m".to_owned(), 4), ("restarts".to_owned(), 1)]);
    // Its file was replaced, and no worker of the new one serves yet.
    registry.set_fleet_models(HashMap::from([("restarts".to_owned(), vec![9])]));
    assert!(listed().contains(&("restarts".to_owned(), 1)));
}

#[tokio::test]
async fn an_alias_means_its_model_and_a_key_for_it_is_good_for_nothing_else() {
    let registry = registry();
    let mut aliased = Arc::into_inner(model("m", 1, 1, 1)).unwrap();
    aliased.description.aliases = vec!["gpt".to_owned()];
    register(&registry, &Arc::new(aliased));
    let resolve = |name, access: ModelAccess| registry.resolve(name, &access).map(|m| m.name().to_owned());
    let only = |name: &str| ModelAccess::only(vec![name.to_owned()]);
    let m = || Ok("m".to_owned());
    assert_eq!(resolve(Some("gpt"), ModelAccess::default()), m());
    assert_eq!(resolve(Some("gpt"), only("m")), m());
    assert_eq!(resolve(None, only("gpt")), m());
    let known = vec!["gpt".to_owned()];
    assert_eq!(resolve(Some("m"), only("gpt")), Err(ResolveError::Unknown { name: "m".to_owned(), known }));
}

/// What the supervisor says now: the next worker of each of these models.
fn answer(models: &[(&str, NextWorker)]) -> FleetAnswer {
    let models = models.iter().map(|(name, next)| ((*name).to_owned(), *next)).collect();
    FleetAnswer { asked: Instant::now(), models, failures: HashMap::new(), aliases: HashMap::new() }
}

#[tokio::test]
async fn a_worker_is_expected_for_a_model_that_has_lost_its_last_one() {
    let registry = registry();
    let wait = Duration::from_secs(30);
    let served = model("m", 1, 1, 1);
    // Times of two steps differ.
    let step = || std::thread::sleep(Duration::from_millis(2));
    let lose_worker = || {
        let worker = register(&registry, &served);
        step();
        registry.remove(worker);
        step();
    };
    let next = || registry.next_worker(served.key(), wait);
    let is_unknown = |next: Option<ExpectedWorker>| {
        next.is_some_and(|next| {
            next.until == Some(next.not_before + wait) && next.not_before < Instant::now()
        })
    };
    lose_worker();
    assert!(is_unknown(next()), "{:?}", next());
    let start = Instant::now() + wait;
    registry.set_fleet_reply(SupervisorReply::Answer(answer(&[("m", NextWorker::At(start))])));
    assert_eq!(next(), Some(ExpectedWorker { not_before: start, until: None }));
    lose_worker();
    assert!(is_unknown(next()), "an answer that is older than the loss says nothing: {:?}", next());
    registry.set_fleet_reply(SupervisorReply::Answer(answer(&[("m", NextWorker::Never)])));
    assert_eq!(next(), None);
    registry.set_fleet_reply(SupervisorReply::Silence);
    assert!(is_unknown(next()), "{:?}", next());
}

#[tokio::test]
async fn a_worker_with_the_same_text_serves_requests_of_a_model_without_workers() {
    let registry = registry();
    let (served, other_file) = (model("m", 1, 1, 1), model("m", 2, 2, 2));
    let worker = register(&registry, &served);
    registry.remove(worker);
    assert_eq!(registry.key_with_workers(&served), *served.key());
    register(&registry, &other_file);
    assert_eq!(registry.key_with_workers(&served), *served.key(), "its tokens are others");
    let next = || registry.next_worker(served.key(), Duration::from_secs(30));
    assert_eq!(next(), None, "it is replaced");
    registry.set_fleet_models(HashMap::from([("m".to_owned(), vec![1])]));
    assert!(next().is_some(), "a swap has not been committed");
    registry.set_fleet_models(HashMap::from([("m".to_owned(), vec![2])]));
    assert_eq!(next(), None);
    let restarted = model("m", 3, 1, 1);
    register(&registry, &restarted);
    assert_eq!(registry.key_with_workers(&served), *restarted.key());
    register(&registry, &served);
    assert_eq!(registry.key_with_workers(&served), *served.key());
}

#[tokio::test]
async fn only_a_supervisor_that_has_not_answered_yet_is_waited_for() {
    let registry = registry();
    let began = Instant::now();
    assert!(registry.may_be_answered_after(began), "it was not asked yet");
    let asked = |time| FleetAnswer { asked: time, ..answer(&[]) };
    registry.set_fleet_reply(SupervisorReply::Answer(asked(began)));
    assert!(registry.may_be_answered_after(began), "it was asked before the model was new");
    registry.set_fleet_reply(SupervisorReply::Silence);
    assert!(registry.may_be_answered_after(began), "it is asked again");
    registry.set_fleet_reply(SupervisorReply::Answer(asked(began + Duration::from_millis(1))));
    assert!(!registry.may_be_answered_after(began));
    registry.set_fleet_reply(SupervisorReply::NoSupervisor);
    assert!(!registry.may_be_answered_after(began));
}

#[tokio::test]
async fn a_model_that_the_supervisor_lists_is_not_unknown_before_its_worker_has_told_it() {
    let registry = registry();
    register(&registry, &model("a", 1, 1, 1));
    let resolve = |name: &str| registry.resolve(Some(name), &ModelAccess::default()).unwrap_err();
    assert!(!registry.has_unheard_models() && matches!(resolve("b"), ResolveError::Unknown { .. }));
    let at = NextWorker::At(Instant::now());
    registry.set_fleet_reply(SupervisorReply::Answer(answer(&[
        ("a", at),
        ("b", at),
        ("unloaded", NextWorker::Never),
    ])));
    assert!(registry.has_unheard_models() && registry.is_listed("b", &ModelAccess::default()));
    assert_eq!(resolve("b"), ResolveError::NotAllKnown);
    assert!(matches!(resolve("unloaded"), ResolveError::Unknown { .. }));
    let mut failed = answer(&[("a", at), ("b", at), ("c", NextWorker::Never)]);
    failed.failures.insert("c".to_owned(), "no room".to_owned());
    failed.aliases.insert("other-b".to_owned(), "b".to_owned());
    registry.set_fleet_reply(SupervisorReply::Answer(failed));
    assert_eq!(resolve("c").to_string(), "the model `c` cannot be loaded: no room");
    assert_eq!(resolve("other-b"), ResolveError::NotAllKnown);
    let is_listed = |name: &str, access: &ModelAccess| registry.is_listed(name, access);
    assert!(is_listed("other-b", &ModelAccess::default()) && !is_listed("other-c", &ModelAccess::default()));
    let only_b = ModelAccess::only(vec!["b".to_owned()]);
    let found = registry.resolve(Some("other-b"), &only_b).unwrap_err();
    assert_eq!(found, ResolveError::NotAllKnown);
    let only_a = ModelAccess::only(vec!["a".to_owned()]);
    assert!(matches!(registry.resolve(Some("c"), &only_a), Err(ResolveError::Unknown { .. })));
    assert!(!is_listed("b", &only_a) && !is_listed("other-b", &only_a));
    assert!(matches!(registry.resolve(Some("b"), &only_a), Err(ResolveError::Unknown { .. })));
    register(&registry, &model("b", 2, 2, 2));
    assert!(!registry.has_unheard_models());
}

#[tokio::test]
async fn models_of_the_fleet_stay_known_however_many_have_no_worker() {
    let registry = registry();
    let names: Vec<String> = (0..12).map(|n| format!("m{n}")).collect();
    registry.set_fleet_models(names.iter().map(|name| (name.clone(), Vec::new())).collect());
    for (name, n) in names.iter().zip(1..) {
        let worker = register(&registry, &model(name, n, n, n.into()));
        registry.remove(worker);
    }
    register(&registry, &model("last", 99, 99, 99));
    assert_eq!(registry.model_keys().len(), names.len() + 1);
}

#[tokio::test]
async fn a_key_for_one_model_wakes_no_other_one_of_a_fleet_of_idle_models() {
    let registry = registry();
    registry.set_fleet_reply(SupervisorReply::Answer(answer(&[
        ("a", NextWorker::OnDemand),
        ("b", NextWorker::OnDemand),
    ])));
    let only_a = ModelAccess::only(vec!["a".to_owned()]);
    let resolve = |name| registry.resolve(Some(name), &only_a).unwrap_err();
    assert_eq!(resolve("a"), ResolveError::NoModel);
    assert!(matches!(resolve("b"), ResolveError::Unknown { .. }));
    assert!(registry.is_listed("a", &only_a) && !registry.is_listed("b", &only_a));
}

#[tokio::test]
async fn requests_for_a_replaced_file_wait_for_the_new_one() {
    let registry = registry();
    let served = model("m", 1, 1, 1);
    let worker = register(&registry, &served);
    let says = |digest: &[u8], files: &str| {
        registry.set_fleet_models(HashMap::from([("m".to_owned(), digest.to_vec())]));
        let (name, files) = ("m".to_owned(), files.to_owned());
        registry.set_fleet_files(vec![ModelFiles { name, digest: digest.to_vec(), files }]);
    };
    let resolve = |name| registry.resolve(name, &ModelAccess::default()).map(|model| model.key().clone());
    registry.set_fleet_reply(SupervisorReply::Answer(answer(&[("m", NextWorker::OnDemand)])));
    says(&served.description.digest, "old");
    says(b"", "old");
    assert_eq!(resolve(Some("m")).as_ref(), Ok(served.key()), "it is idle");
    // Its worker still has streams.
    says(b"", "new");
    assert_eq!(resolve(Some("m")), Err(ResolveError::NotAllKnown));
    assert_eq!(resolve(None), Err(ResolveError::NotAllKnown));
    registry.remove(worker);
    says(b"", "new");
    let replaced = model("m", 2, 2, 2);
    register(&registry, &replaced);
    says(&replaced.description.digest, "new");
    assert_eq!(resolve(Some("m")).as_ref(), Ok(replaced.key()));
}
