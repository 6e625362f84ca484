//! Any bytes as a request: no panic in any accessor, and a body that is taken comes out with the
//! same fields and goes in again.
#![no_main]

use fak_wire::openai::{Api, Request};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    for api in [Api::Chat, Api::Completions] {
        let Ok(mut request) = Request::parse(api, body) else { return };
        let written = request.to_bytes();
        let again = Request::parse(api, &written).expect("what was written can be read");
        assert_eq!(again.to_bytes(), written);
        let _ = (request.model(), request.stream(), request.include_usage(), request.cache_salt());
        let _ = (request.priority(), request.prompt_cache_key(), request.prompt());
        let _ = (request.messages(), request.max_tokens(), request.choices());
        if request.set_include_usage(true).is_ok() {
            assert_eq!(request.include_usage(), Ok(true));
        }
        request.set_cache_salt(Some("salt"));
        request.set_model("model");
        let again = Request::parse(api, &request.to_bytes()).expect("what was set can be read");
        assert_eq!(again.cache_salt(), Ok(Some("salt".to_owned())));
        assert_eq!(again.model(), Ok(Some("model".to_owned())));
    }
});
