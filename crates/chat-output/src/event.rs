// SPDX-License-Identifier: Apache-2.0

//! What a parser reports.

/// A part of the output. Calls are numbered from 0; the events of a call are not mixed with those
/// of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatEvent {
    Text(String),
    Reasoning(String),
    /// `id` is the one that the model wrote, if the format has ids.
    CallStarted {
        index: usize,
        id: Option<String>,
        name: String,
    },
    /// Some of the call's arguments. Joined, they are one JSON object.
    Arguments {
        index: usize,
        json: String,
    },
    CallEnded {
        index: usize,
    },
}

impl ChatEvent {
    /// Appends `next` to `events`, joined with the last event if both are of the same kind.
    pub(crate) fn append(events: &mut Vec<Self>, next: Self) {
        match (events.last_mut(), next) {
            (Some(Self::Text(text)), Self::Text(more)) => text.push_str(&more),
            (Some(Self::Reasoning(text)), Self::Reasoning(more)) => text.push_str(&more),
            (Some(Self::Arguments { index, json }), Self::Arguments { index: of, json: more })
                if *index == of =>
            {
                json.push_str(&more);
            }
            (_, next) => events.push(next),
        }
    }
}
