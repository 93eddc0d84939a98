// SPDX-License-Identifier: Apache-2.0

//! `ballast bench router-overhead`: what the router costs, compared with the worker's socket.

use loadgen::{PathSpeed, RouterLoad, RouterOverheadError, StreamLoad, measure_router_overhead};
use serde_json::json;
use service::Exit;
use service::exit::one_line;

use super::{BenchFleetArguments, fleet_error, lifecycle_error, load_error};
use crate::cli_error::{CliError, CliResult};
use crate::terminal::print_stdout;

#[derive(clap::Args)]
pub(super) struct RouterOverheadArguments {
    #[command(flatten)]
    fleet: BenchFleetArguments,
    #[arg(long, value_name = "N", default_value_t = 64)]
    streams: u32,
    #[arg(long, value_name = "N", default_value_t = 16)]
    prompt_tokens: u32,
    #[arg(long, value_name = "N", default_value_t = 256)]
    tokens: u32,
    /// Requests of one token in each round, one after the other, for the time to the first token
    #[arg(long, value_name = "N", default_value_t = 100)]
    lone_requests: u32,
    #[arg(long, value_name = "N", default_value_t = 9)]
    rounds: u32,
}

pub(super) async fn router_overhead(arguments: RouterOverheadArguments) -> CliResult {
    let RouterOverheadArguments { fleet: options, streams, prompt_tokens, tokens, lone_requests, rounds } =
        arguments;
    let streams = StreamLoad { streams, prompt_tokens, tokens, schema: None };
    let fleet = options.start()?;
    let measured = measure_router_overhead(&fleet, RouterLoad { streams, lone_requests, rounds }).await;
    fleet.stop().await.map_err(fleet_error)?;
    let report = measured.map_err(overhead_error)?;
    if options.json {
        return print_stdout(&format!("{}\n", json!(report)));
    }
    let mut text = String::new();
    for (name, speed) in [("worker", &report.worker), ("gRPC", &report.grpc), ("HTTP", &report.http)] {
        let PathSpeed { tokens_per_s, first_token_ms, lone_first_token_ms } = speed;
        text += &format!(
            "{name}: {tokens_per_s:.0?} tokens/s, first token {first_token_ms:.2?} ms, alone {lone_first_token_ms:.3?} ms\n"
        );
    }
    for (name, cost) in [("gRPC", report.grpc_cost), ("HTTP", report.http_cost)] {
        text += &format!(
            "the router with {name} costs {:.2}% of the throughput of {} streams, {:.2} ms of their first \
             tokens, and {:.3} ms of the first token of a request alone\n",
            cost.throughput_percent, streams.streams, cost.first_token_ms, cost.lone_first_token_ms,
        );
    }
    print_stdout(&text)
}

fn overhead_error(error: RouterOverheadError) -> CliError {
    match error {
        RouterOverheadError::Fleet(error) => fleet_error(error),
        RouterOverheadError::Worker(error) => lifecycle_error(error),
        RouterOverheadError::Load(error) => load_error(error),
        error @ RouterOverheadError::Client(_) => CliError::new(Exit::Internal, one_line(&error)),
    }
}
