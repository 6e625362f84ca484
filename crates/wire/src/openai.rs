//! Bodies of the OpenAI API as vLLM speaks it: requests that pass through unharmed, answers whole
//! and in chunks, errors, and how a stream ended.
//! Invariant: what is not understood is kept or passed over, never changed; a request field that is
//! understood and wrong is an error that names it, its value and what is right.

mod answer;
mod bounded;
mod end;
mod error;
mod passing;
mod request;
mod tokenize;
mod typed;

pub use answer::{Answer, AnswerError, CachedTokens, Choice, StreamItem, Usage, beside_usage};
pub use end::{StreamEnd, StreamWatch};
pub use error::{ErrorBody, ErrorCode};
pub use passing::{Finish, PassingAnswer};
pub use request::{Api, FIELDS_MAX, Prompt, Request, RequestError};
pub use tokenize::Tokenized;
pub use typed::TypedEvent;
