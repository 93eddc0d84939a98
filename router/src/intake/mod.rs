// SPDX-License-Identifier: Apache-2.0

//! What clients may hold before a request is admitted: connections, and bytes of request bodies.
//!
//! ```text
//! accept -- ConnectionTable: connections in all and of one address; closes the longest idle one
//!   head -- a deadline, and limits of HTTP/2 (crate::listener)
//!   body -- BodyPace: minimum rate; ByteBudget: bytes of all requests
//!  parse -- few large bodies at once, and a limit on JSON values (crate::http)
//! ```
//!
//! The policies are plain values without a clock: [`ConnectionTable`], [`ByteBudget`] and
//! [`BodyPace`].

mod body_pace;
mod byte_budget;
mod client_address;
mod connection_table;
mod request_body;

pub(crate) use body_pace::PaceLimits;
pub(crate) use byte_budget::{BudgetLimits, SharedBudget};
pub(crate) use client_address::ClientAddress;
pub(crate) use connection_table::{Arrival, ConnectionLimits, ConnectionTable, TcpConnectionId};
pub(crate) use request_body::{
    BodyError, BodyLimits, ClientConnection, RequestBytes, body_error, limit_request_body,
};
