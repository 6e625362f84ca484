//! Text to tokens and back: one token a byte behind the special tokens, and the chat template.
//! Invariant: `decode(encode(text)) == text`, and a longer text's tokens start with a prefix's.
//!
//! The special tokens and the template are those of the rig's tiny model (`tiny_model.py`); its
//! byte pair merges are not imitated, so token counts of texts differ from the real engine's.

/// Token ids are below this, as in the rig's model.
pub const VOCABULARY: u32 = 4096;

const SPECIALS: [&str; 5] = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"];
const FIRST_BYTE: u32 = SPECIALS.len() as u32;
const FIRST_WORD: u32 = FIRST_BYTE + 256;

/// The token of one byte.
#[must_use]
pub fn byte_token(byte: u8) -> u32 {
    FIRST_BYTE + u32::from(byte)
}

/// Splits text into tokens. Special tokens in the text are recognised, as the real tokenizer does.
#[must_use]
pub fn encode(text: &str) -> Vec<u32> {
    let mut tokens = Vec::with_capacity(text.len());
    let mut rest = text;
    'text: while let Some(first) = rest.as_bytes().first() {
        if *first == b'<' {
            for (id, special) in (0..).zip(SPECIALS) {
                if let Some(after) = rest.strip_prefix(special) {
                    tokens.push(id);
                    rest = after;
                    continue 'text;
                }
            }
        }
        let width = rest.chars().next().map_or(1, char::len_utf8);
        tokens.extend(rest.as_bytes()[..width].iter().map(|byte| byte_token(*byte)));
        rest = &rest[width..];
    }
    tokens
}

/// The text of tokens. Bytes that are no UTF-8 become replacement characters.
#[must_use]
pub fn decode(tokens: &[u32], with_specials: bool) -> String {
    let mut bytes = Vec::with_capacity(tokens.len());
    for &token in tokens {
        match token {
            FIRST_BYTE..FIRST_WORD => {
                bytes.extend(u8::try_from(token - FIRST_BYTE));
            }
            FIRST_WORD.. => bytes.extend(format!(" w{token}").into_bytes()),
            special if with_specials => {
                bytes.extend_from_slice(SPECIALS[special as usize].as_bytes());
            }
            _ => {}
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Renders messages of role and content as the rig's chat template does.
#[must_use]
pub fn chat_prompt<'a>(
    messages: impl IntoIterator<Item = (&'a str, &'a str)>,
    add_generation_prompt: bool,
) -> String {
    let mut text = String::new();
    for (role, content) in messages {
        text.push_str(&format!("<|im_start|>{role}\n{content}<|im_end|>\n"));
    }
    if add_generation_prompt {
        text.push_str("<|im_start|>assistant\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_a_round_trip() {
        let text = "<|im_start|>user\nhällo <wörld> \u{1F980}<|im_end|>\n";
        assert_eq!(decode(&encode(text), true), text);
        assert_eq!(encode("<|im_start|>"), [3]);
        assert_eq!(decode(&encode("a<|im_end|>b"), false), "ab");
    }

    #[test]
    fn longer_text_starts_with_the_tokens_of_its_prefix() {
        let long = encode("The quick brown fox jumps");
        assert!(long.starts_with(&encode("The quick")));
    }

    #[test]
    fn chat_template_is_the_rigs() {
        let text = chat_prompt([("user", "hi")], true);
        assert_eq!(text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    }
}
