//! Values for a property: of each type that its schema declares, and of those that an engine takes
//! in place of it.

use serde_json::{Value, json};

/// References inside references; the schemas of 0.32.0 need two.
const DEPTH_MAX: usize = 4;

/// A property with its references replaced by what they stand for.
pub(super) fn resolve(property: &Value, document: &Value) -> Value {
    resolved(property, document, 0)
}

fn resolved(property: &Value, document: &Value, depth: usize) -> Value {
    if depth > DEPTH_MAX {
        return Value::Null;
    }
    let reference = property.get("$ref").and_then(Value::as_str);
    if let Some(pointer) = reference.and_then(|reference| reference.strip_prefix('#')) {
        let target = document.pointer(pointer).unwrap_or(&Value::Null);
        return resolved(target, document, depth + 1);
    }
    let mut whole = property.clone();
    for key in ["anyOf", "oneOf", "allOf"] {
        if let Some(options) = whole.get_mut(key).and_then(Value::as_array_mut) {
            options.iter_mut().for_each(|option| *option = resolved(option, document, depth + 1));
        }
    }
    whole
}

/// Two or three values of each declared type, and what pydantic takes for another type's: a
/// boolean for a number, a number for a boolean, and null.
pub(super) fn of(property: &Value) -> Vec<Value> {
    let mut values = Vec::new();
    declared(property, &mut values);
    values.extend([json!(true), json!(false), json!(0), json!(1), Value::Null]);
    let mut distinct: Vec<Value> = Vec::new();
    for value in values {
        if !distinct.contains(&value) {
            distinct.push(value);
        }
    }
    distinct
}

fn declared(property: &Value, values: &mut Vec<Value>) {
    for key in ["anyOf", "oneOf", "allOf"] {
        let options = property.get(key).and_then(Value::as_array);
        options.into_iter().flatten().for_each(|option| declared(option, values));
    }
    values.extend(property.get("const").cloned());
    if let Some(named) = property.get("enum").and_then(Value::as_array) {
        values.extend(named.iter().take(3).cloned());
        return;
    }
    match property.get("type").and_then(Value::as_str) {
        Some("boolean") => values.extend([json!(true), json!(false)]),
        Some("integer") => values.extend([json!(1), json!(2), json!(-1)]),
        Some("number") => values.extend([json!(0.5), json!(1.0), json!(-1.0)]),
        Some("string") => values.extend([json!("x"), json!("")]),
        Some("array") => values.extend([json!([]), json!(["x"]), json!([7])]),
        Some("object") => values.extend([json!({}), json!({"x": 1}), json!({"type": "text"})]),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_property_has_values_of_each_of_its_types() {
        let document = json!({"schemas": {"Level": {"type": "string", "enum": ["low", "high"]}}});
        let property = json!({"anyOf": [{"type": "integer"}, {"$ref": "#/schemas/Level"}]});
        let values = of(&resolve(&property, &document));
        for value in [json!(2), json!("low"), json!("high"), json!(false), Value::Null] {
            assert!(values.contains(&value), "{value} of {values:?}");
        }
        assert!(!values.contains(&json!("x")));
    }

    #[test]
    fn a_reference_to_itself_ends() {
        let document = json!({"a": {"$ref": "#/a"}});
        assert_eq!(resolve(&json!({"$ref": "#/a"}), &document), Value::Null);
    }
}
