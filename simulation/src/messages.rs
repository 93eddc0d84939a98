// SPDX-License-Identifier: Apache-2.0

//! Every message and timer of the simulation.

use std::rc::Rc;
use std::sync::Arc;

use handoff::lease_record::LeaseRecord;
use proto::weights::v1 as wire;
use proto::weights::v1::RefusalReason;
use supervisor::Termination;
use weight_server::catalog::{GenerationContents, LoadKey};
use weight_server::events::WeightServerEvent;
use weight_server::tokens::TokenDigest;
use weight_server::waiters::{AttachParams, LeaseClaim};

use crate::network::SimPid;
use crate::weights::WeightCopy;

/// The token of one start of a worker.
pub(crate) type TokenBytes = [u8; 32];

#[derive(Debug)]
pub(crate) enum Message {
    World(ToWorld),
    Child(ToChild),
    Supervisor(ToSupervisor),
    WeightServer(ToWeightServer),
    Worker(ToWorker),
    Router(ToRouter),
}

#[derive(Debug)]
pub(crate) enum ToWorld {
    Fault,
    Arrival,
    StartSupervisor,
    /// The end of a SIGSTOP.
    Continue {
        pid: SimPid,
    },
    /// A router gives up a worker that does not answer pings.
    LinkTimeout {
        worker: SimPid,
        since: u64,
    },
}

/// What every child gets.
#[derive(Debug)]
pub(crate) enum ToChild {
    Ping,
    /// End of file on the liveness socket.
    SupervisorLost {
        supervisor: SimPid,
    },
    Offer {
        number: u64,
    },
    Adopted {
        supervisor: SimPid,
        offer: u64,
    },
    Terminate,
    Exit,
}

/// A datagram of a child to its supervisor.
#[derive(Debug)]
pub(crate) enum Notice {
    Ready,
    Ping,
    Store { name: String, item: StoredItem },
    Remove { name: String },
    Barrier { number: u64 },
    Offer { number: u64, token: Option<TokenBytes> },
}

/// What a descriptor in the FD store refers to.
#[derive(Clone, Debug)]
pub(crate) enum StoredItem {
    Allocation { copy: Rc<WeightCopy>, index: usize },
    Manifest(Rc<SimManifest>),
    Retired,
    Pidfd(SimPid),
    Record(LeaseRecord),
}

/// What a manifest says. It holds no memory.
#[derive(Debug)]
pub(crate) struct SimManifest {
    pub(crate) generation: u64,
    pub(crate) model: String,
    pub(crate) key: LoadKey,
    pub(crate) contents: GenerationContents,
}

#[derive(Debug)]
pub(crate) enum ToSupervisor {
    Notice { child: Arc<str>, pid: SimPid, notice: Notice },
    ChildExited { child: Arc<str>, pid: SimPid, termination: Termination },
    DeadlinePassed { child: Arc<str> },
    Tick { at: u64 },
    AdminAnswer { call: u64, answer: AdminAnswer },
    RetryAdmin { call: u64 },
}

#[derive(Clone, Debug)]
pub(crate) enum AdminRequest {
    AllowToken { name: String, digest: TokenDigest },
    ForgetToken { name: String },
    Status,
    Load { model: String },
    Unload { model: String, generation: Option<u64> },
}

#[derive(Debug)]
pub(crate) enum AdminAnswer {
    /// No process answers, or it says that it cannot yet.
    Unavailable,
    Done,
    Status(Box<wire::Status>),
    Loaded {
        generation: u64,
        digest: [u8; 32],
    },
    /// `is_memory_short`: older weights may be in the way.
    Failed {
        is_memory_short: bool,
    },
}

#[derive(Debug)]
pub(crate) enum ToWeightServer {
    Ready,
    Tick,
    Event(Box<WeightServerEvent>),
    LoaderDone { generation: u64 },
    Attach { connection: u64, pid: SimPid, params: Box<AttachParams> },
    Reclaim { connection: u64, pid: SimPid, claim: Box<LeaseClaim> },
    Returned { connection: u64, manifest: Rc<SimManifest>, copy: Rc<WeightCopy> },
    Admin { call: u64, request: AdminRequest },
    BarrierAnswered { number: u64 },
    BarrierTimeout { number: u64 },
}

/// A frame of the weight-server to a worker.
#[derive(Debug)]
pub(crate) enum ServerFrame {
    Waiting,
    Granted {
        lease: u64,
        manifest: Rc<SimManifest>,
        copy: Rc<WeightCopy>,
    },
    Reclaimed,
    ReturnRequested,
    Refused(RefusalReason),
    /// End of the connection.
    Closed,
}

#[derive(Debug)]
pub(crate) enum ToWorker {
    Ready,
    Attach,
    Frame { connection: u64, frame: ServerFrame },
    Claim { attempt: u64 },
    ClaimTimeout { connection: u64 },
    Step,
    Generate { stream: u64, router: SimPid, call: Box<GenerateCall> },
    Cancel { stream: u64 },
    Report,
}

/// A call of a choice: the prompt and the output so far.
#[derive(Debug)]
pub(crate) struct GenerateCall {
    pub(crate) source: u64,
    pub(crate) prompt: Arc<[u32]>,
    pub(crate) output: Vec<u32>,
    pub(crate) max_tokens: u32,
    /// The worker crashes when it computes this output token.
    pub(crate) crash_at: Option<usize>,
    pub(crate) content: u64,
}

/// A frame of a worker's stream.
#[derive(Debug)]
pub(crate) enum StreamFrame {
    Admitted,
    Full,
    NotServing,
    Tokens(Vec<u32>),
    Finished,
    /// The worker ends the stream because it drains.
    Drains,
    /// The connection broke.
    Died,
}

#[derive(Debug)]
pub(crate) enum ToRouter {
    Ready,
    Tick,
    WorkerServes { pid: SimPid, model: u8, source: u64, generation: u64 },
    WorkerGone { pid: SimPid },
    Report { pid: SimPid, running: u32, waiting: u32, steps: u64 },
    Frame { stream: u64, frame: StreamFrame },
    Retry { request: u64, number: u64 },
}
