// SPDX-License-Identifier: Apache-2.0

//! The reply to `Stats`, from the engine's last snapshot.

use proto::worker::v1 as wire;

use crate::attach::AttachedModelInfo;
use crate::config::WorkerConfig;
use crate::engine_loop::EngineSnapshot;
use crate::engine_thread::ServingEngine;
use crate::startup_timeline::{PostReadyStages, StartupStage, milliseconds};
use crate::workspace::WorkspaceBytes;

/// The figures of an attached worker. The caller adds those of its process.
pub(super) fn stats_reply(config: &WorkerConfig, engine: &ServingEngine) -> wire::StatsReply {
    let ServingEngine { handle, info } = engine;
    let now = handle.snapshot();
    let stats = now.stats;
    let depth = config.engine_config().draft_depth_max;
    // Each token takes one entry in a block of every KV cache group.
    let tokens = |blocks: usize| (blocks * stats.kv_block_tokens / stats.kv_groups.max(1)) as u64;
    wire::StatsReply {
        draining: now.is_draining,
        attach_ms: info.attach.as_secs_f64() * 1e3,
        weight_bytes: info.weight_bytes,
        private_bytes: 0,
        running: stats.running as u32,
        waiting: stats.waiting as u32,
        kv_total_tokens: tokens(stats.kv_blocks),
        kv_used_tokens: tokens(stats.kv_blocks_used),
        kv_cached_tokens: tokens(stats.kv_blocks_cached),
        kv_unfilled_tokens: now.kv_usage.unused_tokens as u64,
        kv_used_bytes: (stats.kv_blocks_used * stats.kv_block_bytes) as u64,
        steps: stats.steps,
        prompt_tokens_computed: stats.prompt_tokens_computed,
        prompt_tokens_cached: stats.prompt_tokens_cached,
        output_tokens: stats.output_tokens,
        preemptions: stats.preemptions,
        evictions: stats.evictions,
        finished: stats.finished,
        refused: stats.refused,
        draft_tokens_per_position: stats.drafts.drafted[..depth].to_vec(),
        accepted_tokens_per_position: stats.drafts.accepted[..depth].to_vec(),
        draft_failures: stats.drafts.failures,
        forks: stats.forks,
        deferred_logits: stats.deferred_rows,
        log_lines_lost: service::logging::lost_lines(),
        trace_spans_dropped: 0,
        device: info.device.clone(),
        context_bytes: info.context_bytes,
        kv_reserved_bytes: config.kv_bytes.0,
        workspace_bytes: info.workspace_bytes,
        startup_stages: startup_stages(info, &now),
        ready_ms: milliseconds(info.timeline.total()),
        kv_mapped_bytes: Some(now.kv_usage.bytes),
        workspace_used: now.backend_usage.workspace_used.map(workspace_usage),
        next_kv_event: stats.kv_events,
    }
}

/// The stages until the engine was built, then those of its first steps, as far as they have come.
fn startup_stages(info: &AttachedModelInfo, now: &EngineSnapshot) -> Vec<wire::StartupStage> {
    let post_ready = PostReadyStages { first_step: now.first_step, lazy_init: now.backend_usage.lazy_init };
    let stages = info.timeline.stages().iter().copied().chain(post_ready.stages());
    let to_wire =
        |StartupStage { name, took }| wire::StartupStage { name: name.to_owned(), ms: milliseconds(took) };
    stages.map(to_wire).collect()
}

fn workspace_usage(used: WorkspaceBytes) -> wire::WorkspaceUsage {
    // The process as a whole is measured in `private_bytes`.
    let WorkspaceBytes { activations, scratch, graphs, modules, process: _ } = used;
    wire::WorkspaceUsage { activations, scratch, graphs, modules }
}
