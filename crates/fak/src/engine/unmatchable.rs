//! Requests whose prompts an engine's prefix cache does not answer as their tokens alone would.
//!
//! Invariant: what is not surely harmless counts as harmful: a field is set unless it is `null`.

use std::borrow::Cow;
use std::fmt;

use fak_wire::openai::{Api, Request};
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, de};

use super::Models;

/// Why a request cannot be matched with an engine's prefix cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmatchable {
    /// The engine computes the whole prompt, whatever its caches hold.
    SkipsCache,
    /// It is answered by requests of the engine's own, and nothing tells what they cost.
    BeamSearch,
    /// It has content that is not text: blocks of one placeholder differ by what stands for it.
    Content,
    /// The engine applies the adapter that is named like a part of its content.
    ByModality,
}

/// Why a request cannot be matched with the prefix cache of an engine that serves `models`, where
/// it cannot.
#[must_use]
pub fn unmatchable(request: &Request, models: &Models) -> Option<Unmatchable> {
    if skips_prefix_cache(request) {
        return Some(Unmatchable::SkipsCache);
    }
    if is_true(request, "use_beam_search") {
        return Some(Unmatchable::BeamSearch);
    }
    match content(request) {
        Content::Strings => None,
        // vLLM runs it with the one adapter that is named like a part's type up to its first `_`
        // (0.32.0, `_get_active_default_mm_loras`, read).
        Content::TextParts => models.has("text").then_some(Unmatchable::ByModality),
        Content::Other => Some(Unmatchable::Content),
    }
}

/// Whether the engine computes the whole prompt, whatever its caches hold: it does where the
/// prompt's log probabilities are asked for. `false` is a number to it, 0, and asks for them; in a
/// chat `echo` alone does, since `top_logprobs` is 0 by itself; in completions `echo` does with
/// `logprobs` (0.32.0, source; observed).
#[must_use]
pub fn skips_prefix_cache(request: &Request) -> bool {
    let echoes = is_true(request, "echo");
    match request.api() {
        _ if is_set(request, "prompt_logprobs") => true,
        Api::Chat => echoes,
        Api::Completions => echoes && is_set(request, "logprobs"),
    }
}

fn is_set(request: &Request, field: &str) -> bool {
    request.raw(field).is_some_and(|raw| raw != "null")
}

/// Whether a field of type boolean may be true: vLLM takes `1`, `"yes"` and more for it.
fn is_true(request: &Request, field: &str) -> bool {
    is_set(request, field) && request.raw(field) != Some("false")
}

/// What the messages of a chat hold, the best that is true of all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Content {
    /// Strings, or nothing.
    Strings,
    /// Lists of parts that are text.
    TextParts,
    /// Something else, or something that is read in two ways.
    Other,
}

fn content(request: &Request) -> Content {
    if request.api() != Api::Chat {
        return Content::Strings;
    }
    let raw = request.raw("messages").unwrap_or("null");
    let messages: Vec<Message> = serde_json::from_str(raw).unwrap_or_else(|_| {
        let content = Content::Other;
        vec![Message { content, reasoning_content: None }]
    });
    messages.iter().map(Message::content).max().unwrap_or(Content::Strings)
}

/// One message. A name that comes twice is refused: an engine and fak might not read the same one.
#[derive(Deserialize)]
struct Message {
    #[serde(default = "Content::nothing")]
    content: Content,
    /// The chat route renames it, and `/tokenize` passes over it (0.32.0, source).
    #[serde(default)]
    reasoning_content: Option<IgnoredAny>,
}

impl Message {
    fn content(&self) -> Content {
        if self.reasoning_content.is_some() { Content::Other } else { self.content }
    }
}

impl Content {
    fn nothing() -> Self {
        Self::Strings
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or an array of parts")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Content, E> {
        Ok(Content::Strings)
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<Content, E> {
        Ok(Content::Strings)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
        let mut content = Content::TextParts;
        while let Some(part) = parts.next_element::<Part>()? {
            if part.kind != "text" {
                content = Content::Other;
            }
        }
        Ok(content)
    }
}

#[derive(Deserialize)]
struct Part<'a> {
    #[serde(borrow, default, rename = "type")]
    kind: Cow<'a, str>,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::engine::Model;

    fn request(api: Api, more: &Value) -> Request {
        let mut body = json!({"model": "m", "prompt": "p", "messages": []});
        body.as_object_mut().expect("an object").extend(more.as_object().expect("one").clone());
        Request::parse(api, body.to_string().as_bytes()).expect("a body")
    }

    /// vLLM 0.32.0, `to_sampling_params` of both routes and `SamplingParams.__post_init__`.
    #[test]
    fn every_form_that_skips_the_prefix_cache_is_known() {
        use Api::{Chat, Completions};
        for (apis, more, skips) in [
            (&[Chat, Completions][..], json!({"prompt_logprobs": 0}), true),
            (&[Chat, Completions], json!({"prompt_logprobs": 1}), true),
            (&[Chat, Completions], json!({"prompt_logprobs": -1}), true),
            (&[Chat, Completions], json!({"prompt_logprobs": false}), true),
            (&[Chat, Completions], json!({"prompt_logprobs": true}), true),
            (&[Chat, Completions], json!({"prompt_logprobs": 0.0}), true),
            (&[Chat, Completions], json!({"prompt_logprobs": "0"}), true),
            (&[Chat, Completions], json!({"prompt_logprobs": null}), false),
            (&[Chat], json!({"echo": true}), true),
            (&[Chat], json!({"echo": 1}), true),
            (&[Chat], json!({"echo": "yes"}), true),
            (&[Chat], json!({"echo": true, "top_logprobs": null}), true),
            (&[Chat], json!({"echo": true, "logprobs": false}), true),
            (&[Chat, Completions], json!({"echo": false}), false),
            (&[Completions], json!({"echo": true}), false),
            (&[Completions], json!({"echo": true, "logprobs": null}), false),
            (&[Completions], json!({"echo": true, "logprobs": false}), true),
            (&[Completions], json!({"echo": true, "logprobs": 0}), true),
            (&[Completions], json!({"echo": 1, "logprobs": 1}), true),
            (&[Chat, Completions], json!({"logprobs": 1, "top_logprobs": 2}), false),
        ] {
            for api in apis {
                let request = request(*api, &more);
                assert_eq!(skips_prefix_cache(&request), skips, "{api:?} {more}");
                let why = unmatchable(&request, &Models::default());
                assert_eq!(why, skips.then_some(Unmatchable::SkipsCache), "{api:?} {more}");
            }
        }
        let beam = request(Chat, &json!({"use_beam_search": true, "n": 2}));
        assert_eq!(unmatchable(&beam, &Models::default()), Some(Unmatchable::BeamSearch));
    }

    #[test]
    fn content_that_is_not_text_and_text_that_names_an_adapter_are_not_matched() {
        let named =
            |name: &str| [Model::base("m"), Model::adapter(name, "m")].into_iter().collect();
        let (plain, text): (Models, Models) = (named("sql"), named("text"));
        let part = |kind: &str| json!([{"type": kind, "text": "t"}]);
        let of = |content: Value, models: &Models| {
            let messages = json!([{"role": "system", "content": "s"}, {"content": content}]);
            unmatchable(&request(Api::Chat, &json!({ "messages": messages })), models)
        };
        for (content, without, with) in [
            (json!("words"), None, None),
            (json!(null), None, None),
            (json!([]), None, Some(Unmatchable::ByModality)),
            (part("text"), None, Some(Unmatchable::ByModality)),
            (part("image_url"), Some(Unmatchable::Content), Some(Unmatchable::Content)),
            (part("audio"), Some(Unmatchable::Content), Some(Unmatchable::Content)),
            (part("Text"), Some(Unmatchable::Content), Some(Unmatchable::Content)),
            (json!([{"image_url": "x"}]), Some(Unmatchable::Content), Some(Unmatchable::Content)),
            (json!(["words"]), Some(Unmatchable::Content), Some(Unmatchable::Content)),
            (json!({"type": "text"}), Some(Unmatchable::Content), Some(Unmatchable::Content)),
            (json!(7), Some(Unmatchable::Content), Some(Unmatchable::Content)),
        ] {
            assert_eq!(of(content.clone(), &plain), without, "{content}");
            assert_eq!(of(content.clone(), &text), with, "{content}");
        }
        let twice = br#"{"messages":[{"content":"a","content":[{"type":"image_url"}]}]}"#;
        let twice = Request::parse(Api::Chat, twice).expect("a body");
        assert_eq!(unmatchable(&twice, &plain), Some(Unmatchable::Content));
        let renamed = json!([{"role": "assistant", "content": "a", "reasoning_content": "r"}]);
        let renamed = request(Api::Chat, &json!({ "messages": renamed }));
        assert_eq!(unmatchable(&renamed, &plain), Some(Unmatchable::Content));
    }
}
