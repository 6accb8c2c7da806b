// As cells.py: the questions, and one line of JSON with the result of each feature.
const given = JSON.parse(process.env.PIC_CLIENT);
export const { url, model, document, cache } = given;
export const [HELLO, THINK, LOOK, CUT, ASK] = ["hello", "think", "look", "cut", "nothing"].map((name) => `Please (say ${name})`);
export const ABOUT = "Look somewhere.", SEEN = "A boat, red.";
export const SCHEMA = {
  type: "object", properties: { kind: { type: "string", enum: ["harbour", "town"] } }, required: ["kind"],
  additionalProperties: false,
};
export const PLACE = { type: "object", properties: { at: { type: "string" } }, required: ["at"], additionalProperties: false };
export const user = (content) => [{ role: "user", content }];

export async function report(features) {
  const results = {};
  for (const [name, feature] of Object.entries(features)) {
    try {
      results[name] = await feature();
    } catch (error) {
      results[name] = { error: error.constructor.name, message: error.message };
    }
  }
  console.log("\n" + JSON.stringify(results));
}
